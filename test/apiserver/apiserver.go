// Package apiserver runs kube-apiserver and etcd for tests that need no nodes,
// and ends them with the test, also when the test is killed.
package apiserver

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// Newest is the version of the API server where nothing else is asked for.
const Newest = "1.37"

// Versions returns the versions of Kubernetes that tests of several versions are to
// run on: those of $TESSERA_KUBERNETES, separated by commas, or else the newest.
func Versions() []string {
	if list := os.Getenv("TESSERA_KUBERNETES"); list != "" {
		return strings.Split(list, ",")
	}
	return []string{Newest}
}

// onceParentEnds is a program's stand-in: the program gets SIGKILL when the
// thread that started it ends. envtest has no setting for that.
const onceParentEnds = "#!/bin/sh\nexec setpriv --pdeathsig KILL %q \"$@\"\n"

// Binaries makes dir a directory of kube-apiserver, etcd and kubectl, as Start
// wants them. It takes those of $KUBEBUILDER_ASSETS, or else those of the newest
// version, as BinariesOf does.
func Binaries(ctx context.Context, dir string, log io.Writer) error {
	if from := os.Getenv("KUBEBUILDER_ASSETS"); from != "" {
		return standIns(from, dir)
	}
	return BinariesOf(ctx, Newest, dir, log)
}

// BinariesOf makes dir a directory of kube-apiserver, etcd and kubectl of a
// version. They are those of the local cluster, and are built into the cache if they
// aren't there, which takes minutes.
func BinariesOf(ctx context.Context, kubernetes, dir string, log io.Writer) error {
	built := filepath.Join(dir, "built")
	if err := cluster.Build(ctx, cluster.Versions{Kubernetes: kubernetes}, built, log); err != nil {
		return fmt.Errorf("build kube-apiserver and etcd: %w", err)
	}
	return standIns(built, dir)
}

func standIns(from, dir string) error {
	for _, name := range []string{"kube-apiserver", "etcd"} {
		script := fmt.Sprintf(onceParentEnds, filepath.Join(from, name))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			return fmt.Errorf("write the stand-in of %s: %w", name, err)
		}
	}
	if err := os.Symlink(filepath.Join(from, "kubectl"), filepath.Join(dir, "kubectl")); err != nil {
		return fmt.Errorf("link kubectl: %w", err)
	}
	return nil
}

// patience is how long a program may take to start or to stop, and the server to
// serve CRDs, each. envtest's own 10 and 20 s are too short for a busy machine.
const patience = 3 * time.Minute

// Start starts the environment with the binaries that Binaries has put into dir.
// The two programs are killed, if Stop hasn't ended them, when the calling
// goroutine ends: it stays locked to its thread.
func Start(env *envtest.Environment, dir string) (*rest.Config, error) {
	env.BinaryAssetsDirectory = dir
	env.ControlPlaneStartTimeout, env.ControlPlaneStopTimeout = patience, patience
	certificates, err := os.MkdirTemp(dir, "certificates-") // which outlive an Upgrade
	if err != nil {
		return nil, fmt.Errorf("make a directory for certificates: %w", err)
	}
	server := env.ControlPlane.GetAPIServer()
	server.CertDir = certificates
	// Without it, a server that is stopped waits a minute for the ends of watches.
	server.Configure().Set("shutdown-watch-termination-grace-period", "1s")
	env.CRDInstallOptions.MaxTime = patience
	runtime.LockOSThread()
	config, err := env.Start()
	if err != nil {
		return nil, fmt.Errorf("start kube-apiserver and etcd of %s: %w", dir, err)
	}
	return config, nil
}

// Upgrade stops the API server of a started environment, and starts the one that
// Binaries or BinariesOf has put into dir, at the same address and on the same etcd.
// The flags --feature-gates and --runtime-config have these values then; an empty
// one isn't passed. Like Start, it locks the calling goroutine to its thread.
func Upgrade(env *envtest.Environment, dir, featureGates, runtimeConfig string) error {
	runtime.LockOSThread()
	s := env.ControlPlane.GetAPIServer()
	if err := s.Stop(); err != nil {
		return fmt.Errorf("stop kube-apiserver: %w", err)
	}
	s.Args = nil //nolint:staticcheck // the arguments of the stopped one, which would be appended
	s.Path = filepath.Join(dir, "kube-apiserver")
	for name, value := range map[string]string{"feature-gates": featureGates, "runtime-config": runtimeConfig} {
		if value == "" {
			s.Configure().Disable(name)
		} else {
			s.Configure().Set(name, value)
		}
	}
	if err := s.Start(); err != nil {
		return fmt.Errorf("start kube-apiserver of %s: %w", dir, err)
	}
	return nil
}

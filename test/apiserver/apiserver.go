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
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/test/cluster"
)

// kubernetes is the version of the API server.
const kubernetes = "1.37"

// onceParentEnds is a program's stand-in: the program gets SIGKILL when the
// thread that started it ends. envtest has no setting for that.
const onceParentEnds = "#!/bin/sh\nexec setpriv --pdeathsig KILL %q \"$@\"\n"

// Binaries makes dir a directory of kube-apiserver, etcd and kubectl, as Start
// wants them. It takes those of $KUBEBUILDER_ASSETS, or else those of the local
// cluster, which are built into the cache if they aren't there.
func Binaries(ctx context.Context, dir string, log io.Writer) error {
	from := os.Getenv("KUBEBUILDER_ASSETS")
	if from == "" {
		from = filepath.Join(dir, "built")
		if err := cluster.Build(ctx, kubernetes, from, log); err != nil {
			return fmt.Errorf("build kube-apiserver and etcd: %w", err)
		}
	}
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
	env.CRDInstallOptions.MaxTime = patience
	runtime.LockOSThread()
	config, err := env.Start()
	if err != nil {
		return nil, fmt.Errorf("start kube-apiserver and etcd of %s: %w", dir, err)
	}
	return config, nil
}

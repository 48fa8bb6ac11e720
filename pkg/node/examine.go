package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/bootid"
	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/driver"
)

// Examine compares the journal, the CDI directory, the MPS daemons and the hardware of the node
// whose plugin has the configuration's directories and roots; nothing else of
// it is used. It changes nothing and doesn't disturb a plugin that runs.
func Examine(ctx context.Context, cfg Config, o doctor.Options) (doctor.Report, error) {
	bootID, err := bootid.Read()
	if err != nil {
		return doctor.Report{}, err
	}
	host := driverroot.NewHost(cfg.HostRoot)
	n := doctor.Node{
		Journal: datadir.JournalOf(cfg.DataDir), CDI: cfg.CDIDir, Host: hostFS{host}, BootID: bootID, Kubernetes: kubernetesVersion(ctx),
		NoHookDir: datadir.CheckHookDirs(host, cfg.DataDir, cfg.otherHookDirs()...),
	}
	daemons, err := mps.Dial(cfg.MPSSocket)
	if err != nil {
		return doctor.Report{}, fmt.Errorf("--mps-socket: %w", err)
	}
	shared := sharingState{ctx: ctx, daemons: daemons, runDir: mps.RunDirOf(cfg.MPSSocket)}
	n.MPSDir = shared.runDir.Daemons()
	root, session, err := driver.Open(host, cfg.DriverRoot)
	if err != nil {
		n.NoHardware, n.Sharing = err, shared
		return doctor.Examine(ctx, n, o)
	}
	defer func() {
		if err := session.Close(); err != nil {
			klog.FromContext(ctx).V(2).Info("Closing NVML", "err", err)
		}
	}()
	n.Hardware, n.Capabilities = session, filepath.Join(root.ProcRoot, "proc/driver/nvidia/capabilities")
	shared.session, shared.smi = session, driver.SMI(host, root)
	n.Sharing = shared
	return doctor.Examine(ctx, n, o)
}

// kubernetesVersion asks the API server of the pod that this runs in; empty
// where there is none or it doesn't answer.
func kubernetesVersion(ctx context.Context) string {
	cfg, err := rest.InClusterConfig()
	if err != nil {
		return ""
	}
	cfg.Timeout = serverPatience
	client, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return ""
	}
	info, err := client.ServerVersionWithContext(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Asking the API server for its version", "err", err)
		return ""
	}
	return info.GitVersion
}

// serverPatience is how long the API server has to answer.
const serverPatience = 5 * time.Second

// hostFS is the host's file system from its root, symbolic links included.
type hostFS struct{ host driverroot.Host }

// errOnlyLooks says that nothing is opened: a device node that is opened does
// something.
var errOnlyLooks = errors.New("the host's files are only looked at")

func (h hostFS) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: errOnlyLooks}
}

func (h hostFS) Stat(name string) (info fs.FileInfo, err error) {
	err = h.host.Do(func() error {
		info, err = os.Stat("/" + name)
		return err
	})
	return info, err
}

// NoExec reports whether no program can be started in a directory.
func (h hostFS) NoExec(dir string) (bool, error) { return h.host.NoExec(dir) }

func (h hostFS) ReadFile(name string) (data []byte, err error) {
	err = h.host.Do(func() error {
		data, err = os.ReadFile("/" + name)
		return err
	})
	return data, err
}

package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/bootid"
	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Places are where the state of a plugin's node is, by the plugin's flags.
type Places struct {
	HostRoot, DriverRoot, DataDir, CDIDir, MPSSocket string
	// HookDirs are the directories of the host that may have the hook program if none in
	// DataDir can.
	HookDirs []string
}

// Run examines a node. It changes nothing and doesn't disturb a plugin that runs.
func Run(ctx context.Context, p Places, o Options) (Report, error) {
	bootID, err := bootid.Read()
	if err != nil {
		return Report{}, err
	}
	host := driverroot.NewHost(p.HostRoot)
	n := Node{
		Journal: datadir.JournalOf(p.DataDir), CDI: p.CDIDir, Host: host, BootID: bootID, Kubernetes: kubernetesVersion(ctx),
		NoHookDir: datadir.CheckHookDirs(host, p.DataDir, p.HookDirs...),
	}
	daemons, err := mps.Dial(p.MPSSocket)
	if err != nil {
		return Report{}, fmt.Errorf("--mps-socket: %w", err)
	}
	run := mps.RunDirOf(p.MPSSocket)
	root, session, err := driver.Open(host, p.DriverRoot)
	if err != nil {
		n.NoHardware = err
		return Examine(ctx, o, n, func(n *Node) error {
			n.Sharing = readSharing(ctx, daemons, run)
			return nil
		})
	}
	defer func() {
		if err := session.Close(); err != nil {
			klog.FromContext(ctx).V(2).Info("Closing NVML", "err", err)
		}
	}()
	n.Capabilities = filepath.Join(root.ProcRoot, "proc/driver/nvidia/capabilities")
	smi := sharing.SMI(driver.SMI(host, root))
	return Examine(ctx, o, n, func(n *Node) (err error) {
		// The daemons come first: nvidia-smi, which reads time slices, takes its time.
		n.Sharing = readSharing(ctx, daemons, run)
		n.Hardware, err = ReadHardware(ctx, session, smi)
		return err
	})
}

// askWithin bounds each question.
const askWithin = 10 * time.Second

// ReadHardware reads the GPUs.
func ReadHardware(ctx context.Context, session *nvml.Session, smi sharing.SMI) (*Hardware, error) {
	all, err := session.GPUs()
	if err != nil {
		return nil, fmt.Errorf("read the GPUs: %w", err)
	}
	hw := &Hardware{
		GPUs: all, MIG: map[gpu.UUID]gpu.MIG{}, NoMIG: map[gpu.UUID]error{},
		ComputeModes: map[gpu.UUID]nvml.ComputeMode{}, TimeSlices: map[gpu.UUID]string{},
	}
	for _, g := range all {
		if g.Answered() {
			hw.read(ctx, session, smi, g)
		}
	}
	return hw, nil
}

// read reads the state of a GPU that its facts don't have.
func (hw *Hardware) read(ctx context.Context, session *nvml.Session, smi sharing.SMI, g gpu.GPU) {
	if g.MIG != nil {
		mig, err := session.MIG(g.UUID)
		if err == nil {
			hw.MIG[g.UUID] = mig
		} else {
			hw.NoMIG[g.UUID] = err
		}
	}
	if mode, err := session.ComputeMode(g.UUID); err == nil {
		hw.ComputeModes[g.UUID] = mode
	}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	if interval, err := sharing.ReadTimeSlice(ctx, smi, g.UUID); err == nil {
		hw.TimeSlices[g.UUID] = interval
	}
}

// SharingOf returns the MPS daemons: those that the supervisor lists, or why it doesn't, and
// those that have a directory in its run directory.
func SharingOf(listed mps.Report, away error, run mps.RunDir) *Sharing {
	remains, _ := run.Names()
	return &Sharing{Daemons: listed.Daemons, Away: away, Dir: run.Daemons(), Remains: remains}
}

// readSharing asks the supervisor.
func readSharing(ctx context.Context, supervisor *mps.Client, run mps.RunDir) *Sharing {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	listed, err := supervisor.List(ctx)
	return SharingOf(listed, err, run)
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

// Command preparefiles prepares a claim through the kubelet's socket and writes the coverage of
// that call, and its execution trace; see hack/joints. The hardware is the simulator's,
// the API server and the MPS supervisor are stand-ins. Needs root.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/coverage"
	"runtime/trace"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	draclient "k8s.io/dynamic-resource-allocation/client"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/claimstatus"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/events"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	pool   = "node-0"
	bootID = "boot"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: preparefiles DIRECTORY SUFFIX-OF-THE-DEVICE")
		os.Exit(2)
	}
	if err := run(os.Args[1], gpu.DeviceName(os.Args[2])); err != nil {
		fmt.Fprintln(os.Stderr, "preparefiles:", err)
		os.Exit(1)
	}
}

func run(dir string, suffix gpu.DeviceName) error {
	tmp, err := os.MkdirTemp("", "p")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	n, err := start(tmp)
	if err != nil {
		return err
	}
	defer n.stop()
	c := claimOf(n.first + suffix)
	client, err := n.serve(tmp, c)
	if err != nil {
		return err
	}
	// The connection is made before it counts.
	if _, err := client.NodePrepareResources(n.ctx, &drapbv1.NodePrepareResourcesRequest{}); err != nil {
		return err
	}
	if err := awaitServing(n.ctx); err != nil {
		return err
	}
	if err := errors.Join(coverage.WriteMetaDir(dir), coverage.ClearCounters()); err != nil {
		return err
	}
	calls, err := os.Create(filepath.Join(dir, "trace"))
	if err != nil {
		return err
	}
	defer calls.Close()
	if err := trace.Start(calls); err != nil {
		return err
	}
	response, err := client.NodePrepareResources(n.ctx, &drapbv1.NodePrepareResourcesRequest{
		Claims: []*drapbv1.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}},
	})
	trace.Stop()
	if err := errors.Join(err, coverage.WriteCountersDir(dir)); err != nil {
		return err
	}
	if got := response.GetClaims()[string(c.UID)]; got.GetError() != "" || len(got.GetDevices()) != 1 {
		return fmt.Errorf("prepare %s: %v", n.first+suffix, got)
	}
	return nil
}

// awaitServing waits until the plugin has finished starting. Its socket answers earlier, and the
// rest of the start would be counted as a part of the call. The plugin doesn't report the end
// of its start, so awaitServing looks at the goroutines: kubelet.Plugin's watchSockets waits
// then. If it is renamed, rename it here.
func awaitServing(ctx context.Context) error {
	stacks := make([]byte, 1<<20)
	err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			state, calls, _ := strings.Cut(g, "\n")
			if strings.Contains(state, "[select") && strings.Contains(calls, "kubelet.(*Plugin).watchSockets(") {
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("wait until kubelet.Plugin's watchSockets waits: %w", err)
	}
	return nil
}

// running is the part of the plugin that prepares claims, on a node with one GPU.
type running struct {
	ctx      context.Context //nolint:containedctx // of the program
	stop     func()
	first    gpu.DeviceName // the GPU
	preparer *prepare.Preparer
	facts    *facts.Facts
	journal  *journal.Journal
}

func start(tmp string) (*running, error) {
	built, err := nodetest.Build(tmp)
	if err != nil {
		return nil, err
	}
	d, err := nodetest.Install(tmp, built, "h100-80gb", pool)
	if err != nil {
		return nil, err
	}
	host := driverroot.NewHost(d.Host)
	root, session, err := driver.Open(host, "")
	if err != nil {
		return nil, err
	}
	r, err := driver.ReadNode(pool, host, root, session)
	if err != nil {
		return nil, err
	}
	return wire(tmp, host, root, session, r.Node)
}

func wire(tmp string, host driverroot.Host, root driverroot.Root, session *nvml.Session, there gpu.Node) (*running, error) {
	j, err := journal.Open(filepath.Join(tmp, "journal"), nil)
	if err != nil {
		return nil, err
	}
	marks, err := containers.New(filepath.Join(tmp, "marks"), driverroot.NewHost("/"))
	if err != nil {
		return nil, err
	}
	specs := cdi.New(cdi.Config{Dir: filepath.Join(tmp, "cdi"), HookPath: "/hook", Host: host, Mark: marks.Mark})
	if err := specs.SetDriver(&cdi.Driver{
		Version: there.DriverVersion, Root: root.Path, DevRoot: root.DevRoot, ProcRoot: root.ProcRoot,
		LibraryDirs: root.LibraryDirs, GPUs: there.GPUs, Session: session,
	}); err != nil {
		return nil, err
	}
	known := facts.New(pool)
	known.Found(there)
	known.SawNode(true, "")
	partitions := partition.New(partition.Config{Journal: j, Specs: specs, Facts: known, BootID: bootID})
	partitions.SetHardware(session)
	daemons := nodetest.NewDaemons(host.Path("/"), "/run/mps/d")
	shares := sharing.New(sharing.Config{Journal: j, BootID: bootID, Daemons: daemons, ExclusiveProcess: true})
	shares.SetHardware(session, nil)
	names, err := gpu.NewNames(there.GPUs)
	if err != nil {
		return nil, err
	}
	first, _ := names.Name(gpu.Whole{GPU: there.GPUs[0].UUID})
	ctx, cancel := context.WithCancel(context.Background())
	go shares.Watch(ctx)
	client := fake.NewClientset()
	return &running{ctx: ctx, stop: cancel, first: first, facts: known, journal: j, preparer: prepare.New(prepare.Config{
		Journal: j, Facts: known, Containers: marks, Partitions: partitions, Sharing: shares, Specs: specs,
		Events: events.New("preparefiles", pool), Statuses: claimstatus.New(client, gpu.DriverName, pool), Cluster: draclient.New(client),
		Driver: gpu.DriverName, Pool: pool, BootID: bootID,
	})}, nil
}

// serve serves the kubelet and returns its end of the socket.
func (r *running) serve(tmp string, c *resourceapi.ResourceClaim) (drapbv1.DRAPluginClient, error) {
	if err := os.Mkdir(filepath.Join(tmp, "plugins_registry"), 0o755); err != nil {
		return nil, err
	}
	plugin := kubelet.New(kubelet.Config{Driver: gpu.DriverName, Root: tmp, Client: fake.NewClientset(c), Claims: r.preparer, Pool: pool, Journal: r.journal, Facts: r.facts})
	go func() {
		if err := plugin.Run(r.ctx); err != nil {
			fmt.Fprintln(os.Stderr, "preparefiles:", err)
		}
	}()
	conn, err := grpc.NewClient("unix://"+filepath.Join(kubelet.DataDirectory(tmp, gpu.DriverName), "dra.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		return nil, err
	}
	return drapbv1.NewDRAPluginClient(conn), nil
}

func claimOf(device gpu.DeviceName) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "training", UID: "training"},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: gpu.DriverName, Pool: pool, Device: string(device)}},
		}}},
	}
}

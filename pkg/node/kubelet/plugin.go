package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/kubelet/v1alpha4"
)

// maxSocketPath is the limit of Linux: the 108 bytes of sun_path minus the
// final NUL.
const maxSocketPath = 107

// Claims prepares and unprepares claims; see prepare.Preparer for the
// contracts. Its methods are called concurrently.
type Claims interface {
	Begin(ctx context.Context, claimUIDs ...types.UID) (_ context.Context, done func())
	Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error)
	Unprepare(ctx context.Context, claim kubeletplugin.NamespacedObject) error
}

// Config are the dependencies and settings of a Plugin.
type Config struct {
	// Driver is the name under which the plugin registers.
	Driver string
	// Root is the kubelet's --root-dir, the same path for the kubelet and for
	// this process.
	Root string
	// PodUID, which may be empty, gives the plugin sockets of its own, so that it can
	// be registered while the plugin before still is. See SupportsPodUID.
	PodUID types.UID
	// DataDir is the same for plugins that hand over to each other, and distinguishes
	// them from other drivers of the same name.
	DataDir string
	// CDIDir has the CDI specifications, at the same path here and on the host.
	CDIDir string
	// DeviceMetadata gives containers files about their devices.
	DeviceMetadata bool
	// Client reads ResourceClaims, in the API version that the server has.
	Client kubernetes.Interface
	Claims Claims
	// Pool has the devices of the node: it is the Node's name.
	Pool string
	// Journal has the devices that claims hold, whose health is reported for the pods' status.
	Journal *journal.Journal
	// Facts say how the GPUs are, and are told each time a kubelet has registered the plugin,
	// again after the kubelet's restart, and whether another running driver has its name.
	Facts *facts.Facts
}

// Plugin serves one kubelet.
type Plugin struct {
	cfg  Config
	gate gate
	// apart has sockets of other plugins that have answered with another name.
	apart map[string]os.FileInfo
	// every is the interval of checks of the sockets.
	every time.Duration
	// conflict is the one that was reported last.
	conflict string
	// wasAlone: the name was this plugin's, and the files under it are.
	wasAlone bool
}

// New builds a Plugin; Run starts it.
func New(c Config) *Plugin {
	return &Plugin{cfg: c, apart: map[string]os.FileInfo{}, every: lookEvery}
}

// DataDirectory returns the directory of the plugin's socket.
func DataDirectory(kubeletRoot, driver string) string {
	return filepath.Join(kubeletRoot, "plugins", driver)
}

// Run registers the plugin and serves the kubelet until the context ends; then
// it returns nil. While another driver runs under the same name, it waits
// before it registers, and returns nil if it hands over meanwhile. It returns an
// error if it can't start, because a socket's path is too long or the kubelet's
// directories aren't under Root; if a server fails; and if its sockets were
// removed or replaced and no other driver serves them.
//
// At the end calls in progress are interrupted, as by a crash; those that were passed to
// another plugin are waited for.
func (p *Plugin) Run(ctx context.Context) error {
	if err := p.check(); err != nil {
		return err
	}
	if err := p.waitAlone(ctx); err != nil {
		return nil // the context has ended
	}
	p.wasAlone = true
	if p.gate.handedOver() {
		return nil // the successor registers
	}
	p.removeDead(ctx)
	p.recoverMetadata(ctx)
	running, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer p.EndForwarding()
	old := v1alpha4.New(cancel)
	defer old.Stop()
	noted := make(chan struct{})
	options := append(p.metadataOptions(),
		kubeletplugin.DriverName(p.cfg.Driver),
		kubeletplugin.KubeClient(p.cfg.Client),
		kubeletplugin.RegistrarDirectoryPath(p.registryDirectory()),
		kubeletplugin.PluginDataDirectoryPath(DataDirectory(p.cfg.Root, p.cfg.Driver)),
		kubeletplugin.RollingUpdate(p.cfg.PodUID),
		kubeletplugin.Serialize(false),
		kubeletplugin.HealthService(true),
		kubeletplugin.GRPCInterceptor(p.gate.handle),
		kubeletplugin.GRPCInterceptor(p.announce),
		kubeletplugin.GRPCInterceptor(ofRegistration(after(noted))),
		kubeletplugin.GRPCInterceptor(ofRegistration(p.tellDataDir)),
		kubeletplugin.GRPCInterceptor(ofRegistration(p.noteRegistration)),
		kubeletplugin.GRPCInterceptor(ofRegistration(old.Registration)),
	)
	// Not with running: after a handover calls may end later than that.
	helper, err := kubeletplugin.Start(context.WithoutCancel(ctx), &handler{cfg: p.cfg, gate: &p.gate, fail: cancel}, options...)
	if err != nil {
		return fmt.Errorf("serve the kubelet: %w", err)
	}
	defer helper.Stop()
	own := socketFiles(p.sockets())
	close(noted)
	cancel(p.watchSockets(running, own, old.Intact))
	p.awaitForwarded(ctx)
	if ctx.Err() != nil {
		return nil
	}
	return context.Cause(running)
}

// sockets returns the plugin's sockets for the kubelet: the service socket and
// the registration socket.
func (p *Plugin) sockets() []string {
	return []string{ServiceSocket(p.cfg.Root, p.cfg.Driver, p.cfg.PodUID), p.registrationSocket()}
}

func (p *Plugin) registryDirectory() string { return filepath.Join(p.cfg.Root, "plugins_registry") }

// check checks the conditions for the plugin to work before it starts.
func (p *Plugin) check() error {
	for _, socket := range p.sockets() {
		if len(socket) > maxSocketPath {
			return fmt.Errorf("socket path %s has %d bytes, Linux allows %d: use a --root-dir of the kubelet that is %d bytes shorter",
				socket, len(socket), maxSocketPath, len(socket)-maxSocketPath)
		}
	}
	if _, err := os.Stat(p.registryDirectory()); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the kubelet's directory for plugins %s doesn't exist: is %s the kubelet's --root-dir, and is it mounted here at the same path? %w",
			p.registryDirectory(), p.cfg.Root, err)
	} else if err != nil {
		return fmt.Errorf("check the kubelet's directory for plugins: %w", err)
	}
	if err := os.MkdirAll(DataDirectory(p.cfg.Root, p.cfg.Driver), 0o750); err != nil {
		return fmt.Errorf("create the plugin's directory: %w", err)
	}
	return nil
}

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// maxSocketPath is what Linux takes: sun_path's 108 bytes less the final NUL.
const maxSocketPath = 107

// Claims prepares and unprepares claims; see prepare.Preparer for the
// contracts. Its methods are called from many goroutines at once.
type Claims interface {
	Begin(ctx context.Context, claimUIDs ...types.UID) (_ context.Context, done func())
	Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error)
	Unprepare(ctx context.Context, claim kubeletplugin.NamespacedObject) error
}

// Options are what a Plugin is built from.
type Options struct {
	// Driver is the name under which the plugin registers.
	Driver string
	// Root is the kubelet's --root-dir, the same path for the kubelet and for
	// this process.
	Root string
	// Client reads ResourceClaims, in the API version that the server has.
	Client kubernetes.Interface
	Claims Claims
	// OnRegistered, which may be nil, is called each time a kubelet has
	// registered the plugin, again after the kubelet's restart. It must not
	// block.
	OnRegistered func(time.Time)
	// OnChallenged, which may be nil, is called with the reason while another driver
	// that is alive has the plugin's name, and with "" when none has. It must not
	// block.
	OnChallenged func(string)
}

// Plugin serves one kubelet.
type Plugin struct {
	Options
	underway underway
	// apart are sockets of other plugins that have answered under another name.
	apart map[string]os.FileInfo
	// every is the pause between two looks at the sockets.
	every time.Duration
}

// New builds a Plugin; Run starts it.
func New(o Options) *Plugin {
	if o.OnRegistered == nil {
		o.OnRegistered = func(time.Time) {}
	}
	if o.OnChallenged == nil {
		o.OnChallenged = func(string) {}
	}
	return &Plugin{Options: o, apart: map[string]os.FileInfo{}, every: lookEvery}
}

// DataDirectory is where the plugin's socket is; the journal belongs there
// too.
func DataDirectory(kubeletRoot, driver string) string {
	return filepath.Join(kubeletRoot, "plugins", driver)
}

// Run registers the plugin and serves the kubelet until the context ends;
// then it returns nil. While another driver is alive under the same name, it
// waits before it registers. It returns an error when it can't start: a socket's
// path is too long, or the kubelet's directories aren't where Root says; when a
// server fails; and when its sockets were taken away and nobody has them now.
//
// Calls in progress are cut off at the end, as they would be by a crash.
func (p *Plugin) Run(ctx context.Context) error {
	if err := p.check(); err != nil {
		return err
	}
	if err := p.waitAlone(ctx); err != nil {
		return nil // the context's end
	}
	running, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	helper, err := kubeletplugin.Start(running, &handler{claims: p.Claims, fail: cancel},
		kubeletplugin.DriverName(p.Driver),
		kubeletplugin.KubeClient(p.Client),
		kubeletplugin.RegistrarDirectoryPath(p.registryDirectory()),
		kubeletplugin.PluginDataDirectoryPath(DataDirectory(p.Root, p.Driver)),
		kubeletplugin.Serialize(false),
		kubeletplugin.HealthService(false),
		kubeletplugin.GRPCInterceptor(p.underway.count),
		kubeletplugin.GRPCInterceptor(p.announce),
		kubeletplugin.GRPCInterceptor(p.noteRegistration),
	)
	if err != nil {
		return fmt.Errorf("serve the kubelet: %w", err)
	}
	defer helper.Stop()
	var watched sync.WaitGroup
	defer watched.Wait()
	watched.Go(func() { cancel(p.watchSockets(running)) })
	<-running.Done()
	if ctx.Err() != nil {
		return nil
	}
	return context.Cause(running)
}

// sockets are those by which the kubelet reaches the plugin: the one it calls,
// and the one it finds the plugin by.
func (p *Plugin) sockets() []string {
	return []string{
		filepath.Join(DataDirectory(p.Root, p.Driver), "dra.sock"),
		filepath.Join(p.registryDirectory(), p.Driver+"-reg.sock"),
	}
}

func (p *Plugin) registryDirectory() string { return filepath.Join(p.Root, "plugins_registry") }

// check finds what would make the plugin useless or harmful before it starts.
func (p *Plugin) check() error {
	for _, socket := range p.sockets() {
		if len(socket) > maxSocketPath {
			return fmt.Errorf("socket path %s has %d bytes, Linux allows %d: give the kubelet a --root-dir that is %d shorter",
				socket, len(socket), maxSocketPath, len(socket)-maxSocketPath)
		}
	}
	if _, err := os.Stat(p.registryDirectory()); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s isn't there, where the kubelet looks for plugins: is %s the kubelet's --root-dir, and is it mounted here at the same path? %w",
			p.registryDirectory(), p.Root, err)
	} else if err != nil {
		return fmt.Errorf("look at the kubelet's directory for plugins: %w", err)
	}
	if err := os.MkdirAll(DataDirectory(p.Root, p.Driver), 0o750); err != nil {
		return fmt.Errorf("make the plugin's directory: %w", err)
	}
	return nil
}

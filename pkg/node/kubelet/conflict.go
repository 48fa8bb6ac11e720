package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// answerTime is the time limit for the answer of a running plugin.
	answerTime = 2 * time.Second
	// lookEvery is the interval of checks of the sockets.
	lookEvery = 10 * time.Second
)

// errTaken means that the kubelet can't reach this process any more, and no
// other driver has replaced it, so a restart makes the plugin reachable.
var errTaken = errors.New("the plugin's sockets were removed or replaced by others, and no other driver answers there: the plugin must be restarted")

// waitAlone waits until no other driver runs under the plugin's name.
func (p *Plugin) waitAlone(ctx context.Context) error {
	for {
		err := p.checkAlone(ctx, nil)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p.reportConflict(ctx, err)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(p.every):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// socketFiles returns the sockets' files, nil for one that doesn't exist.
func socketFiles(sockets []string) map[string]os.FileInfo {
	all := make(map[string]os.FileInfo, len(sockets))
	for _, socket := range sockets {
		all[socket], _ = os.Stat(socket)
	}
	return all
}

// watchSockets checks for drivers that take over the plugin's name, until ctx
// ends. It returns errTaken. own are the plugin's sockets as they were created;
// oldIntact reports on a socket for old kubelets, which is created later if at all.
func (p *Plugin) watchSockets(ctx context.Context, own map[string]os.FileInfo, oldIntact func() bool) error {
	for {
		select {
		case <-time.After(p.every):
		case <-ctx.Done():
			return ctx.Err()
		}
		// Before the others are asked: who replaces the sockets after that is noticed next time.
		intact := areThere(own) && oldIntact()
		err := p.checkAlone(ctx, own)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p.reportConflict(ctx, err)
		if err == nil && !intact {
			return errTaken
		}
	}
}

// reportConflict reports the conflict, or that there is none, and logs it once: it may last
// for days, and is checked every few seconds.
func (p *Plugin) reportConflict(ctx context.Context, err error) {
	conflict := ""
	if err != nil {
		conflict = err.Error()
	}
	if err != nil && conflict != p.conflict {
		klog.FromContext(ctx).Error(err, "This driver doesn't serve the kubelet")
	}
	p.conflict = conflict
	p.cfg.Facts.SetOtherDriver(conflict)
}

// areThere reports whether all sockets still exist and are the same files.
func areThere(sockets map[string]os.FileInfo) bool {
	for socket, was := range sockets {
		if now, err := os.Stat(socket); err != nil || was == nil || !os.SameFile(was, now) {
			return false
		}
	}
	return true
}

// checkAlone returns an error if another running plugin offers our driver's
// name to the kubelet, through any socket that isn't ours. A socket of a dead
// plugin doesn't answer.
func (p *Plugin) checkAlone(ctx context.Context, own map[string]os.FileInfo) error {
	sockets, err := filepath.Glob(filepath.Join(p.registryDirectory(), "*.sock"))
	if err != nil {
		return fmt.Errorf("list the kubelet's plugins: %w", err)
	}
	type answer struct {
		socket string
		file   os.FileInfo
		apart  bool
		err    error
	}
	answers := make(chan answer, len(sockets))
	asked := 0
	for _, socket := range sockets {
		file, err := os.Stat(socket)
		if err != nil || isSame(own[socket], file) || isSame(p.apart[socket], file) {
			continue
		}
		asked++
		go func() {
			apart, err := p.checkOther(ctx, socket)
			answers <- answer{socket, file, apart, err}
		}()
	}
	for range asked {
		a := <-answers
		if a.apart {
			p.apart[a.socket] = a.file
		}
		err = errors.Join(err, a.err)
	}
	return err
}

func isSame(a, b os.FileInfo) bool { return a != nil && os.SameFile(a, b) }

// checkOther asks one socket for its driver's name: apart means that it
// answered with another name.
func (p *Plugin) checkOther(ctx context.Context, socket string) (apart bool, _ error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	info, header, err := getInfo(ctx, socket)
	if err != nil {
		return false, nil // a socket that doesn't answer isn't registered under our name
	}
	if p.sameDataDir(header) {
		return false, nil // it has handed over, or is about to take over
	}
	if info.GetName() != p.cfg.Driver || info.GetType() != registerapi.DRAPlugin {
		return true, nil
	}
	return false, fmt.Errorf("another DRA driver is alive on this node under the name %s (sockets %s and %s): two drivers must not serve the same GPUs; uninstall the other one, for example NVIDIA's dra-driver-nvidia-gpu, or keep it off this node",
		p.cfg.Driver, socket, info.GetEndpoint())
}

func getInfo(ctx context.Context, socket string) (*registerapi.PluginInfo, metadata.MD, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	defer conn.Close()
	var header metadata.MD
	info, err := registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{}, grpc.Header(&header))
	return info, header, err
}

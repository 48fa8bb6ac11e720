package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// dataDirHeader is the header with the data directory, which distinguishes plugins that
// hand over to each other from other drivers of the same name.
const dataDirHeader = "tessera-data-dir-bin"

// SupportsPodUID returns an error if plugins on a node can't have sockets of their own:
// the kubelet is older than 1.33 and knows one plugin of a driver only, or the path of a
// socket with the pod's UID would be too long.
func SupportsPodUID(kubeletVersion, root, driver string, podUID types.UID) error {
	v, err := version.ParseGeneric(kubeletVersion)
	if err != nil {
		return fmt.Errorf("read the kubelet's version: %w", err)
	}
	if !v.AtLeast(version.MajorMinor(1, 33)) {
		return fmt.Errorf("kubelet %s knows only one plugin of a driver at a time, 1.33 is needed", kubeletVersion)
	}
	if socket := ServiceSocket(root, driver, podUID); len(socket) > maxSocketPath {
		return fmt.Errorf("socket path %s has %d bytes, Linux allows %d", socket, len(socket), maxSocketPath)
	}
	return nil
}

// ServiceSocket returns the path of the socket for the kubelet's calls, of the pod with
// this UID if it isn't empty.
func ServiceSocket(root, driver string, podUID types.UID) string {
	name := "dra.sock"
	if podUID != "" {
		name = "dra-" + string(podUID) + ".sock"
	}
	return filepath.Join(DataDirectory(root, driver), name)
}

// registrationSocket returns the path of the socket by which the kubelet finds the
// plugin.
func (p *Plugin) registrationSocket() string {
	if p.cfg.PodUID == "" {
		return filepath.Join(p.registryDirectory(), p.cfg.Driver+"-reg.sock")
	}
	return filepath.Join(p.registryDirectory(),
		kubeletplugin.RollingUpdateRegistrarSocketFile(p.registryDirectory(), p.cfg.Driver, p.cfg.PodUID))
}

// tellDataDir is a gRPC interceptor that adds the data directory to the registration's
// answer.
func (p *Plugin) tellDataDir(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if _, ok := req.(*registerapi.InfoRequest); ok {
		if err := grpc.SetHeader(ctx, metadata.Pairs(dataDirHeader, p.cfg.DataDir)); err != nil {
			return nil, fmt.Errorf("answer the registration: %w", err)
		}
	}
	return next(ctx, req)
}

// sameDataDir reports whether the header of a registration's answer is that of a plugin
// with this one's data directory. Only one of them handles calls.
func (p *Plugin) sameDataDir(header metadata.MD) bool {
	values := header.Get(dataDirHeader)
	return p.cfg.DataDir != "" && len(values) == 1 && values[0] == p.cfg.DataDir
}

// removeDead removes the sockets of the driver's plugins that were killed. Those with a
// pod's UID don't hinder other plugins, but the kubelet would try to reach them for ever.
func (p *Plugin) removeDead(ctx context.Context) {
	for _, pattern := range []string{
		filepath.Join(p.registryDirectory(), p.cfg.Driver+"*-reg.sock"),
		filepath.Join(DataDirectory(p.cfg.Root, p.cfg.Driver), "dra*.sock"),
	} {
		sockets, err := filepath.Glob(pattern)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Sockets of killed plugins may stay", "pattern", pattern)
		}
		for _, socket := range sockets {
			if !isDead(ctx, socket) {
				continue
			}
			if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
				klog.FromContext(ctx).Error(err, "The socket of a killed plugin stays", "socket", socket)
			}
		}
	}
}

// isDead reports whether no process listens at the socket.
func isDead(ctx context.Context, socket string) bool {
	conn, err := (&net.Dialer{Timeout: answerTime}).DialContext(ctx, "unix", socket)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, unix.ECONNREFUSED)
}

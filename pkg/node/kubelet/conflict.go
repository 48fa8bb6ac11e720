package kubelet

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// answerTime is what a living plugin has to answer in.
const answerTime = 2 * time.Second

// checkAlone returns an error if a plugin that is alive offers the kubelet our
// driver's name, from whatever socket. A socket that a dead one left behind
// doesn't answer.
func (p *Plugin) checkAlone(ctx context.Context) error {
	sockets, err := filepath.Glob(filepath.Join(p.registryDirectory(), "*.sock"))
	if err != nil {
		return fmt.Errorf("list the kubelet's plugins: %w", err)
	}
	found := make(chan error, len(sockets))
	for _, socket := range sockets {
		go func() { found <- p.checkOther(ctx, socket) }()
	}
	for range sockets {
		if err := <-found; err != nil {
			return err
		}
	}
	return nil
}

// checkOther asks one socket who it is.
func (p *Plugin) checkOther(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	info, err := getInfo(ctx, socket)
	if err != nil || info.GetName() != p.Driver || info.GetType() != registerapi.DRAPlugin {
		return nil // what doesn't answer isn't registered under our name
	}
	return fmt.Errorf("another DRA driver is alive on this node under the name %s (sockets %s and %s): two drivers must not hand out the same GPUs; uninstall the other one, NVIDIA's dra-driver-nvidia-gpu for instance, or keep it off this node",
		p.Driver, socket, info.GetEndpoint())
}

func getInfo(ctx context.Context, socket string) (*registerapi.PluginInfo, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
}

// Command deviceplugin is a device plugin for tests: it offers the kubelet of its
// node COUNT devices of a RESOURCE, and gives the containers that get one of them an
// environment variable DEVICE_PLUGIN with the device's name. It runs until a signal, and
// ends with the kubelet, with which it would have to register again.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "deviceplugin:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if len(args) != 2 {
		return errors.New("usage: deviceplugin RESOURCE COUNT")
	}
	count, err := strconv.Atoi(args[1])
	if err != nil {
		return fmt.Errorf("COUNT: %w", err)
	}
	socket := filepath.Join(api.DevicePluginPath, strings.ReplaceAll(args[0], "/", "-")+".sock")
	if err := os.RemoveAll(socket); err != nil {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	p := &plugin{done: ctx.Done(), left: make(chan struct{}, 1), count: count}
	api.RegisterDevicePluginServer(server, p)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if err := register(ctx, args[0], filepath.Base(socket)); err != nil {
		return fmt.Errorf("register with the kubelet: %w", err)
	}
	select {
	case err := <-served:
		return err
	case <-p.left:
		return errors.New("the kubelet has ended")
	case <-ctx.Done():
		server.Stop()
		return nil
	}
}

func register(ctx context.Context, resource, endpoint string) error {
	kubelet, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer kubelet.Close()
	_, err = api.NewRegistrationClient(kubelet).Register(ctx, &api.RegisterRequest{Version: api.Version, Endpoint: endpoint, ResourceName: resource})
	return err
}

type plugin struct {
	api.UnimplementedDevicePluginServer
	done  <-chan struct{}
	left  chan struct{} // has a token once the kubelet is gone
	count int
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	response := &api.ListAndWatchResponse{}
	for i := range p.count {
		response.Devices = append(response.Devices, &api.Device{ID: fmt.Sprintf("device-%d", i), Health: api.Healthy})
	}
	if err := stream.Send(response); err != nil {
		return err
	}
	select {
	case <-p.done:
	case <-stream.Context().Done():
		select {
		case p.left <- struct{}{}:
		default:
		}
	}
	return nil
}

func (p *plugin) Allocate(_ context.Context, r *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, c := range r.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"DEVICE_PLUGIN": strings.Join(c.DevicesIds, ",")},
		})
	}
	return response, nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// chart of the product, seen from the root of the checkout.
const chart = "deployments/helm/tessera"

// The images of a rollout's plugins.
const firstImage, badImage, mendedImage = "plugin:first", "plugin:bad", "plugin:mended"

// rolloutBench is a rollout of the chart's DaemonSet by the real DaemonSet controller.
type rolloutBench struct {
	*bench
	kube kubernetes.Interface
	pods *playedPods
	set  *appsv1.DaemonSet
	most int // nodes with a new plugin beside the old one that the chart allows at once
}

// rollout measures upgrades of the plugin on many nodes without machines: one to a plugin
// that doesn't become ready, and then one to a plugin that does.
func (b *bench) rollout(ctx context.Context) (err error) {
	if b.real || b.bundle != "" {
		return nil // needs the checkout, and says nothing about hardware
	}
	server, err := startServer(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	config := rest.CopyConfig(server.config)
	config.ContentType = runtime.ContentTypeProtobuf
	r := &rolloutBench{bench: b}
	if r.kube, err = kubernetes.NewForConfig(config); err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	if r.pods, err = playPods(ctx, &running, r.kube, b.scaleNodes); err != nil {
		return err
	}
	stop, err := startControllerManager(server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := r.install(ctx); err != nil {
		return err
	}
	return errors.Join(r.bad(ctx), r.good(ctx))
}

// startControllerManager runs the DaemonSet controller.
func startControllerManager(s *server) (stop func() error, err error) {
	kubeconfig, err := s.kubeconfig(envtest.User{Name: "daemon-sets", Groups: []string{"system:masters"}})
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(filepath.Join(s.dir, "built", "kube-controller-manager"), "--kubeconfig="+kubeconfig,
		"--controllers=daemonset-controller", "--leader-elect=false", "--secure-port=0", "--kube-api-qps=1000", "--kube-api-burst=1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start kube-controller-manager: %w", err)
	}
	return func() error { return (&controllerProcess{cmd: cmd}).stop(syscall.SIGTERM) }, nil
}

// install makes the nodes and the chart's DaemonSet, and waits for all plugins.
func (r *rolloutBench) install(ctx context.Context) error {
	r.progress("making %d nodes with a plugin each", r.scaleNodes)
	group, ctx2 := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i := range r.scaleNodes {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: hollowName(i), Labels: map[string]string{"kubernetes.io/os": "linux", "nvidia.com/gpu.present": "true"},
		}}
		group.Go(func() error {
			made, err := r.kube.CoreV1().Nodes().Create(ctx2, node, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			made.Spec.Taints = nil // of a Node that isn't ready, which another controller removes
			_, err = r.kube.CoreV1().Nodes().Update(ctx2, made, metav1.UpdateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("create the nodes: %w", err)
	}
	if err := r.renderSet(ctx); err != nil {
		return err
	}
	var err error
	r.set.Spec.Template.Spec.Containers[0].Image = firstImage
	if r.set, err = r.kube.AppsV1().DaemonSets("default").Create(ctx, r.set, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create the DaemonSet: %w", err)
	}
	return r.await(ctx, firstImage, func(p *seenPods) bool { return p.ready[firstImage] == r.scaleNodes })
}

// renderSet reads the plugin's DaemonSet out of the chart.
func (r *rolloutBench) renderSet(ctx context.Context) error {
	helm, err := cluster.Tool(ctx, "helm", os.Stderr)
	if err != nil {
		return err
	}
	text, err := exec.CommandContext(ctx, helm, "template", "tessera", chart, "--namespace", "default", "--set=image.repository=plugin",
		"--show-only", "templates/node/daemonset.yaml").Output()
	if err != nil {
		return fmt.Errorf("render the chart: %w", err)
	}
	r.set = &appsv1.DaemonSet{}
	if err := yaml.Unmarshal(text, r.set); err != nil {
		return fmt.Errorf("read the DaemonSet: %w", err)
	}
	r.most, err = intstr.GetScaledValueFromIntOrPercent(r.set.Spec.UpdateStrategy.RollingUpdate.MaxSurge, r.scaleNodes, true)
	return err
}

// upgrade changes the plugin's image, and returns when.
func (r *rolloutBench) upgrade(ctx context.Context, image string) (time.Duration, error) {
	patch := fmt.Appendf(nil, `{"spec":{"template":{"spec":{"containers":[{"name":%q,"image":%q}]}}}}`, r.set.Spec.Template.Spec.Containers[0].Name, image)
	start := monotonic()
	r.pods.begin()
	if _, err := r.kube.AppsV1().DaemonSets("default").Patch(ctx, r.set.Name, "application/strategic-merge-patch+json", patch, metav1.PatchOptions{}); err != nil {
		return 0, fmt.Errorf("change the image to %s: %w", image, err)
	}
	return start, nil
}

func (r *rolloutBench) await(ctx context.Context, image string, ok func(*seenPods) bool) error {
	if err := r.pods.await(ctx, ok); err != nil {
		return fmt.Errorf("wait for the plugins of %s: %w", image, err)
	}
	return nil
}

// bad rolls out a plugin that doesn't become ready.
func (r *rolloutBench) bad(ctx context.Context) error {
	if _, err := r.upgrade(ctx, badImage); err != nil {
		return err
	}
	if err := r.await(ctx, badImage, func(p *seenPods) bool { return p.there[badImage] >= r.most }); err != nil {
		return err
	}
	const late = 10 * time.Second // a rollout that goes on has replaced more by then
	if err := pause(ctx, late); err != nil {
		return err
	}
	replaced, unavailable := r.pods.worst(badImage)
	r.figure(fmt.Sprintf("rollout_bad_%dnodes_replaced", r.scaleNodes), float64(replaced))
	if replaced > r.most || unavailable > 0 {
		return fmt.Errorf("%d nodes have got a bad plugin beside the old one, and %d have been without one; %d and none are allowed", replaced, unavailable, r.most)
	}
	return nil
}

// good rolls out a plugin that is ready soon after its start.
func (r *rolloutBench) good(ctx context.Context) error {
	start, err := r.upgrade(ctx, mendedImage)
	if err != nil {
		return err
	}
	if err := r.await(ctx, mendedImage, func(p *seenPods) bool { return p.ready[mendedImage] == r.scaleNodes }); err != nil {
		return err
	}
	r.figure(fmt.Sprintf("rollout_%dnodes_s", r.scaleNodes), (monotonic() - start).Seconds())
	_, unavailable := r.pods.worst(mendedImage)
	r.figure(fmt.Sprintf("rollout_%dnodes_unavailable", r.scaleNodes), float64(unavailable))
	if unavailable > 0 {
		return fmt.Errorf("%d nodes have been without a plugin; none may", unavailable)
	}
	return nil
}

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	readyTimeout = 3 * time.Minute
	readyPoll    = 100 * time.Millisecond
	// A component that died this often while a cluster comes up won't recover.
	tooManyRestarts = 6
)

// RESTConfig is an administrator's client configuration, without a limit of
// requests per second: benchmarks time single requests.
func (c *Cluster) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.KubeconfigPath())
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig of cluster %s: %w", c.Name(), err)
	}
	config.QPS = -1
	return config, nil
}

// Client is an administrator's client.
func (c *Cluster) Client() (kubernetes.Interface, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of cluster %s: %w", c.Name(), err)
	}
	return client, nil
}

// stage is a part of a cluster that comes up.
type stage struct {
	name string
	done func(context.Context, kubernetes.Interface) bool
}

// waitReady returns when pods can be run: API server ready, base images on all
// nodes, nodes ready, default service account there.
func (c *Cluster) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, errors.New("timed out"))
	defer cancel()
	client, err := c.Client()
	if err != nil {
		return err
	}
	images := make(chan error, 1)
	go func() { images <- c.ensureImages(ctx) }()
	stages := []stage{
		{"the API server", apiserverReady},
		{"the nodes", c.nodesReady},
		{"the default service account", serviceAccountReady},
	}
	if c.hasDriver() {
		stages = append(stages, stage{"the NVIDIA driver", c.driverReady})
	}
	for _, stage := range stages {
		fmt.Fprintf(c.options.Log, "waiting for %s\n", stage.name)
		err := poll(ctx, readyPoll, func() (bool, error) {
			return stage.done(ctx, client), c.failed()
		})
		if err != nil {
			cancel()
			<-images //nolint:errcheck // it is canceled
			return fmt.Errorf("wait for %s: %w%s", stage.name, err, c.diagnosis())
		}
	}
	return errors.Join(<-images, c.applyPlatform(ctx, client))
}

func apiserverReady(ctx context.Context, client kubernetes.Interface) bool {
	return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error() == nil
}

func serviceAccountReady(ctx context.Context, client kubernetes.Interface) bool {
	_, err := client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
	return err == nil
}

func (c *Cluster) nodesReady(ctx context.Context, client kubernetes.Interface) bool {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return false
	}
	ready := 0
	for _, node := range list.Items {
		if nodeReady(node) && strings.HasPrefix(node.Status.NodeInfo.KubeletVersion, "v"+c.options.Kubelet+".") {
			ready++
		}
	}
	return ready == len(c.plan.nodes)
}

// nodeReady also wants the taint of a new node to be gone.
func nodeReady(node corev1.Node) bool {
	tainted := slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady })
	return !tainted && slices.ContainsFunc(node.Status.Conditions, func(condition corev1.NodeCondition) bool {
		return condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
	})
}

// failed reports a component that keeps dying.
func (c *Cluster) failed() error {
	for _, name := range c.Machines() {
		components, err := c.Status(name)
		if err != nil {
			return err
		}
		for _, component := range components {
			if component.Restarts >= tooManyRestarts && component.PID == 0 {
				return fmt.Errorf("%s on %s keeps dying (%s)", component.Name, name, component.LastExit)
			}
		}
	}
	return nil
}

// diagnosis collects the ends of the logs of components that have died.
func (c *Cluster) diagnosis() string {
	var b strings.Builder
	for _, name := range c.Machines() {
		components, err := c.Status(name)
		if err != nil {
			fmt.Fprintf(&b, "\n%v", err)
			continue
		}
		for _, component := range components {
			if component.Restarts == 0 {
				continue
			}
			path := c.LogPath(name, component.Name)
			log, err := os.ReadFile(path)
			if err != nil {
				log = []byte(err.Error())
			}
			fmt.Fprintf(&b, "\n%s on %s died %d times, last: %s; end of %s:\n%s",
				component.Name, name, component.Restarts, component.LastExit, path, lastLines(string(log), 5))
		}
	}
	return b.String()
}

// ensureImages imports the base images into nodes that lack them.
func (c *Cluster) ensureImages(ctx context.Context) error {
	results := make(chan error)
	for _, node := range c.Nodes() {
		go func() { results <- c.ensureNodeImages(ctx, node) }()
	}
	var all error
	for range c.Nodes() {
		all = errors.Join(all, <-results)
	}
	return all
}

func (c *Cluster) ensureNodeImages(ctx context.Context, node string) error {
	var present []string
	err := poll(ctx, readyPoll, func() (bool, error) {
		var err error
		present, err = c.imageNames(ctx, node)
		return err == nil, nil // the runtime may not answer yet; the context limits the wait
	})
	if err != nil {
		return fmt.Errorf("wait for %s on %s: %w", c.RuntimeComponent(), node, err)
	}
	if slices.Contains(present, GlibcImage) && slices.Contains(present, pauseImage) {
		return nil
	}
	return c.importImage(ctx, node, c.Binary(baseImages))
}

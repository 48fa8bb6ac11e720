package control

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/labels"
	"github.com/tessera-dra/tessera/pkg/control/lease"
	"github.com/tessera-dra/tessera/pkg/control/nodes"
	"github.com/tessera-dra/tessera/pkg/control/pages"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/policies"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/ranks"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/endpoints"
	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
	"github.com/tessera-dra/tessera/pkg/scrapeauth"
)

// Config has the settings of the controller.
type Config struct {
	// REST is how to reach the API server.
	REST *rest.Config
	// Namespace of the Lease tessera-controller.
	Namespace string
	// LeaderElect is false only if no other instance can run.
	LeaderElect bool
	// MetricsAddress serves /metrics; "0" serves nothing.
	MetricsAddress string
	// MetricsAuthentication serves them over TLS, and only to those whom the API server
	// lets get the path.
	MetricsAuthentication bool
	// HealthAddress serves /healthz and /readyz; "0" serves nothing.
	HealthAddress string
	// NodeLabels writes labels about GPUs to Nodes. Otherwise those are removed that were
	// written earlier.
	NodeLabels bool
	// Ranks writes taints to Nodes by which schedulers prefer nodes that are in use. Otherwise
	// those are removed that were written earlier.
	Ranks bool
	// Packing are the options of Ranks.
	Packing ranks.Options
	// DeviceClasses is a file of the DeviceClasses that the cluster should have,
	// see classes.Wanted. Empty: the controller leaves DeviceClasses alone.
	DeviceClasses string
}

const (
	// parallelNodes bounds how many nodes are reconciled at once.
	parallelNodes = 8
	// waitPause is between two attempts to reach the API server at the start.
	waitPause = time.Second
	// waitForKinds is how long a server may take to serve the custom resources.
	waitForKinds = 30 * time.Second
)

// Run is the controller: it returns when ctx is done, when it lost its lease,
// or when it can't work with this API server.
func Run(ctx context.Context, c Config) error {
	logger := klog.FromContext(ctx)
	ctrl.SetLogger(logger)
	if c.LeaderElect && c.Namespace == "" {
		return errors.New("the namespace of the Lease is unknown: give --namespace, or set POD_NAMESPACE")
	}
	lock, err := lease.New(clientConfig(c.REST), c.Namespace)
	if err != nil {
		return err
	}
	if c.LeaderElect {
		c.REST = lock.Fence(c.REST)
	}
	clientset, err := newClientset(c.REST)
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	version, err := waitForAPI(ctx, clientset.Discovery())
	if err != nil {
		return err
	}
	logger.Info("Found the API server", "resourceAPI", version)
	resources := draclient.New(clientset)
	publisher, err := publish.New(resources, clientset.Discovery())
	if err != nil {
		return err
	}
	publisher.Release = c.Namespace
	index, err := claims.New(resources)
	if err != nil {
		return err
	}
	mgr, err := newManager(c, lock, logger)
	if err != nil {
		return err
	}
	s := server.New(publisher, clock.RealClock{})
	writes := undone.New(clock.RealClock{})
	if err := addParts(mgr, publisher, index, s, writes); err != nil {
		return err
	}
	if err := errors.Join(addOptional(mgr, c, resources, s, writes), addRanks(mgr, c, clientset, publisher, index, writes)); err != nil {
		return err
	}
	return serve(ctx, c, clientset, mgr)
}

// addOptional makes the manager run what the configuration asks for.
func addOptional(mgr manager.Manager, c Config, resources *draclient.Client, s *server.Server, w *undone.Writes) error {
	if err := addClasses(mgr, c.DeviceClasses, resources, s); err != nil {
		return err
	}
	if !c.NodeLabels {
		return addLabelRemoval(mgr, w)
	}
	return addNodeLabels(mgr, w)
}

// waitForAPI waits until the API server can be reached and serves the custom
// resources, and returns the version of resource.k8s.io to use. A controller that has
// lost its lease because the API server is being upgraded would otherwise end again
// and again, with growing pauses.
func waitForAPI(ctx context.Context, d discovery.ServerResourcesInterface) (string, error) {
	logger := klog.FromContext(ctx)
	for begun := time.Now(); ; {
		version, err := publish.FindAPIVersion(d)
		if err == nil {
			err = findKinds(d)
		}
		early := errors.Is(err, errNotServed) && time.Since(begun) < waitForKinds
		if err == nil || !early && !isTransient(err) {
			return version, err
		}
		logger.Info("Waiting for the API server; if this doesn't end, check the server, the network to it, its certificate and this controller's token", "err", err)
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(waitPause):
		}
	}
}

// errNotServed: the server doesn't serve the custom resources, or not yet: it learns
// of definitions some seconds after its start.
var errNotServed = errors.New("the API server doesn't serve gpu.tessera.dev/v1alpha1: " +
	"install the chart with crds.install=true, or apply its CustomResourceDefinitions")

func findKinds(d discovery.ServerResourcesInterface) error {
	_, err := d.ServerResourcesForGroupVersion(v1alpha1.GroupVersion.String())
	if apierrors.IsNotFound(err) {
		return errNotServed
	}
	return err
}

// isTransient reports whether a request may succeed later without a change of this program:
// its error is one that comes while a server is being restarted, the network to it is broken,
// or its certificates or this program's token are being renewed.
func isTransient(err error) bool {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return status.Status().Code >= http.StatusInternalServerError || apierrors.IsTooManyRequests(err) || apierrors.IsUnauthorized(err)
	}
	_, failed := errors.AsType[*url.Error](err) // no answer came
	return failed
}

// RemoveNodeLabels removes from all Nodes what controllers with NodeLabels have
// written. None may be running.
func RemoveNodeLabels(ctx context.Context, c Config) error {
	api, err := client.New(clientConfig(c.REST), client.Options{})
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	return labels.RemoveAll(ctx, api)
}

// RemoveRanks removes from all Nodes the taints that controllers with Ranks have written. None may
// be running.
func RemoveRanks(ctx context.Context, c Config) error {
	kube, err := newClientset(c.REST)
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	return ranks.RemoveAll(ctx, kube.CoreV1().Nodes())
}

// addRanks makes the manager rank Nodes, or remove the ranks.
func addRanks(mgr manager.Manager, c Config, kube kubernetes.Interface, p *publish.Publisher, index *claims.Index, w *undone.Writes) error {
	nodes := kube.CoreV1().Nodes()
	if !c.Ranks {
		return mgr.Add(rankRemoval(nodes))
	}
	cluster, err := ranks.Watch(kube, c.Packing.PoolLabel)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	for _, r := range []manager.Runnable{informerRunner{cluster.Nodes}, informerRunner{cluster.Pods}, leadersMetrics(ctrlmetrics.Registry, registry)} {
		if err := mgr.Add(r); err != nil {
			return err
		}
	}
	r := ranks.New(ranks.Config{
		Options: c.Packing, Nodes: nodes, Cache: mgr.GetClient(), Cluster: cluster, Slices: p, Claims: index, Writes: w, Metrics: registry,
		Inventories: kinds.NewInventoryReader(mgr.GetClient(), mgr.GetAPIReader(), clock.RealClock{}), Clock: clock.RealClock{},
	})
	return addRanker(mgr, r, p.Informer(), index.Informer, cluster)
}

// addParts makes the manager run what every controller does.
func addParts(mgr manager.Manager, p *publish.Publisher, c *claims.Index, s *server.Server, w *undone.Writes) error {
	registry := prometheus.NewRegistry()
	if _, err := c.Informer.AddEventHandler(claims.Counter(registry)); err != nil {
		return fmt.Errorf("count claims: %w", err)
	}
	for _, r := range []manager.Runnable{informerRunner{p.Informer()}, informerRunner{c.Informer}, s, leadersMetrics(ctrlmetrics.Registry, registry)} {
		if err := mgr.Add(r); err != nil {
			return err
		}
	}
	api, events := mgr.GetClient(), shortEvents{mgr.GetEventRecorder(publish.FieldManager)}
	planner := plan.New(api, c, s, kinds.Definitions{Server: mgr.GetAPIReader(), Clock: clock.RealClock{}}, registry)
	for _, metrics := range []prometheus.Collector{nodes.NewCollector(api, p, planner), policies.NewCollector(api)} {
		if err := registry.Register(metrics); err != nil {
			return fmt.Errorf("register metrics of policies and pools: %w", err)
		}
	}
	n := nodes.New(nodes.Config{
		Client: api, Reader: mgr.GetAPIReader(), Slices: p, Release: p.Release, Planner: planner, Server: s, Claims: c,
		Writes: w, Events: events, Metrics: registry, Clock: clock.RealClock{}, Leads: mgr.Elected(),
	})
	if err := addNodes(mgr, n, p.Informer(), c.Informer, s); err != nil {
		return err
	}
	r := policies.New(policies.Config{Client: api, Planner: planner, Slices: p, Writes: w, Events: events, Clock: clock.RealClock{}})
	return addPolicies(mgr, r, planner, c.Informer, s)
}

// clientConfig returns the configuration of the controller's clients. They don't limit
// the rate of requests: the API server does, by priority and fairness, and they wait as
// long as it says when it answers 429. parallelNodes bounds how many are under way.
func clientConfig(c *rest.Config) *rest.Config {
	c = rest.CopyConfig(c)
	c.QPS = -1
	c.UserAgent = publish.FieldManager
	c.Wrap(v1alpha3.Transport)
	return c
}

// newClientset returns the client for slices and claims. It speaks protobuf, which costs
// the server and the controller a fraction of JSON's time and memory.
func newClientset(c *rest.Config) (*kubernetes.Clientset, error) {
	c = clientConfig(c)
	c.ContentType = runtime.ContentTypeProtobuf
	c.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	return kubernetes.NewForConfig(c)
}

func newManager(c Config, lock lease.Lock, logger logr.Logger) (manager.Manager, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(clientConfig(c.REST), manager.Options{
		Scheme:                              scheme,
		Logger:                              logger,
		Cache:                               cacheOptions(),
		LeaderElection:                      c.LeaderElect,
		LeaderElectionResourceLockInterface: lock,
		LeaderElectionReleaseOnCancel:       true,
		LeaseDuration:                       new(lease.Duration),
		RenewDeadline:                       new(lease.RenewDeadline),
		RetryPeriod:                         new(lease.RetryPeriod),
		Metrics:                             metricsserver.Options{BindAddress: "0"}, // serve does it
	})
	if err != nil {
		return nil, fmt.Errorf("set up the controller: %w", err)
	}
	return mgr, nil
}

// cacheOptions keep the manager's caches small, also while they are filled.
func cacheOptions() cache.Options {
	trim := new(kinds.Trimmer).Trim
	return cache.Options{
		DefaultTransform: trim,
		NewInformer: func(lw toolscache.ListerWatcher, example runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
			return toolscache.NewSharedIndexInformer(pages.Paged(lw, trim), example, resync, indexers)
		},
	}
}

// serve runs the manager, and serves metrics and probes meanwhile.
func serve(ctx context.Context, c Config, kube kubernetes.Interface, mgr manager.Manager) (err error) {
	metrics := endpoints.Metrics(c.MetricsAddress, ctrlmetrics.Registry)
	if c.MetricsAuthentication {
		if metrics, err = scrapeauth.Guard(kube, metrics); err != nil {
			return err
		}
	}
	alive := func(context.Context) error { return nil }
	ready := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if !mgr.GetCache().WaitForCacheSync(ctx) {
			return errors.New("the caches are not filled yet")
		}
		return nil
	}
	return endpoints.Serve(ctx, mgr.Start, metrics, endpoints.Health(c.HealthAddress, alive, ready))
}

// leadersMetrics adds metrics to the served ones once this instance leads: the other
// replicas would report the same values again, or none.
func leadersMetrics(all prometheus.Registerer, own prometheus.Collector) manager.RunnableFunc {
	return func(ctx context.Context) error {
		if err := all.Register(own); err != nil {
			return fmt.Errorf("serve the controller's metrics: %w", err)
		}
		<-ctx.Done()
		all.Unregister(own)
		return nil
	}
}

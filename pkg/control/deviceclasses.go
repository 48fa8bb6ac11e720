package control

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tessera-dra/tessera/pkg/control/classes"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// addClasses makes the manager keep the DeviceClasses of a file as they are there,
// whenever one of the cluster changes, or the server's abilities. Without a file it
// does nothing.
func addClasses(mgr manager.Manager, file string, d discovery.DiscoveryInterface, s *server.Server) error {
	if file == "" {
		return nil
	}
	wanted, err := classes.Read(file)
	if err != nil {
		return err
	}
	api, err := dynamic.NewForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("make a client of DeviceClasses: %w", err)
	}
	r := classes.New(wanted, d, api, mgr.GetAPIReader(), shortEvents{mgr.GetEventRecorder(publish.FieldManager)})
	if err := mgr.Add(informerRunner{r.Informer}); err != nil {
		return fmt.Errorf("set up the DeviceClass controller: %w", err)
	}
	ctl, err := controller.New("device-class", mgr, controller.Options{
		Reconciler:     r,
		RateLimiter:    workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](undone.FirstRetryDelay, undone.MaxRetryDelay),
		LogConstructor: func(*reconcile.Request) logr.Logger { return mgr.GetLogger() },
	})
	if err != nil {
		return fmt.Errorf("set up the DeviceClass controller: %w", err)
	}
	serverChanged := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{classes.RequestServerChanged()}
	})
	for _, source := range []source.Source{
		informed{r.Informer, "DeviceClasses", classes.Request},
		source.Channel(s.Changes(), serverChanged),
		// Also in a cluster without any class.
		source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			queue.Add(reconcile.Request{})
			return nil
		}),
	} {
		if err := ctl.Watch(source); err != nil {
			return fmt.Errorf("set up the DeviceClass controller: %w", err)
		}
	}
	return nil
}

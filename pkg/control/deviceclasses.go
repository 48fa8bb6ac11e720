package control

import (
	"context"
	"fmt"

	"k8s.io/client-go/util/workqueue"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tessera-dra/tessera/pkg/control/classes"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
)

// addClasses makes the manager keep the DeviceClasses of a file as they are there,
// whenever one of the cluster changes, or the server's abilities. Without a file it
// does nothing.
func addClasses(mgr manager.Manager, file string, resources *draclient.Client, s *server.Server) error {
	if file == "" {
		return nil
	}
	wanted, err := classes.Read(file)
	if err != nil {
		return err
	}
	r := classes.New(wanted, resources, mgr.GetAPIReader(), shortEvents{mgr.GetEventRecorder(publish.FieldManager)})
	if err := mgr.Add(informerRunner{r.Informer}); err != nil {
		return fmt.Errorf("set up the DeviceClass controller: %w", err)
	}
	serverChanged := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{classes.RequestServerChanged()}
	})
	return add(mgr, "device-class", options(mgr, r),
		informed{r.Informer, "DeviceClasses", classes.Request},
		source.Channel(s.Changes(), serverChanged),
		// Also in a cluster without any class.
		source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			queue.Add(reconcile.Request{})
			return nil
		}),
	)
}

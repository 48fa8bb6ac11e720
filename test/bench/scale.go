package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// scaleBench measures the controller's program with many hollow nodes.
type scaleBench struct {
	*bench
	*server

	kube    kubernetes.Interface
	nodes   *hollowNodes
	pools   *poolWatch
	program string // file of the controller
	user    string // the controller's kubeconfig
	running *controllerProcess
	drivers int // how many driver versions were made up
}

// scale measures how the controller's work and memory grow with the number of nodes.
func (b *bench) scale(ctx context.Context) (err error) {
	if b.real || b.bundle != "" {
		return nil // needs the checkout, and says nothing about hardware
	}
	ctrl.SetLogger(logr.Discard())
	server, err := startServer(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	s := &scaleBench{bench: b, server: server}
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, logr.Discard()))
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	if err := s.begin(ctx, &running); err != nil {
		return err
	}
	for _, f := range []func(context.Context) error{
		s.firstPublication, s.bytes, s.changes, s.idleWrites, s.policyEdit, s.zone, s.claims, s.restart, s.leaderChange, s.republication,
	} {
		if err := f(ctx); err != nil {
			return fmt.Errorf("%w\n%s", err, tail(filepath.Join(s.dir, "controller.log")))
		}
	}
	return s.running.stop(syscall.SIGTERM)
}

// begin builds the controller and makes the nodes.
func (s *scaleBench) begin(ctx context.Context, running *sync.WaitGroup) (err error) {
	if s.program, err = buildController(ctx, s.dir); err != nil {
		return err
	}
	if err := s.connect(ctx, running, s.scaleNodes); err != nil {
		return err
	}
	s.progress("making %d nodes of %d GPUs each", s.nodes.n, migGPUs)
	return s.nodes.each(ctx, 0, s.nodes.n, s.nodes.create)
}

// connect makes the controller's user, and everything by which so many nodes are made and
// followed.
func (s *scaleBench) connect(ctx context.Context, running *sync.WaitGroup, nodes int) (err error) {
	if err := s.makeUser(ctx); err != nil {
		return err
	}
	light := rest.CopyConfig(s.config)
	light.ContentType = runtime.ContentTypeProtobuf
	if s.kube, err = kubernetes.NewForConfig(light); err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	if s.pools, err = watchPools(ctx, running, s.kube); err != nil {
		return err
	}
	s.pools.timeout += time.Duration(nodes) * timeoutPerNode
	s.nodes, err = newHollowNodes(ctx, running, s.config, nodes)
	return err
}

// buildController builds the controller's program in a directory.
func buildController(ctx context.Context, dir string) (program string, err error) {
	program = filepath.Join(dir, "controller")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program, "./cmd/controller").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the controller: %w: %s", err, out)
	}
	return program, nil
}

// makeUser gives the controller a service account's name, so that the API server
// doesn't exempt it from priority and fairness, and all rights.
func (s *scaleBench) makeUser(ctx context.Context) error {
	const name = "system:serviceaccount:tessera:tessera-controller"
	kube, err := kubernetes.NewForConfig(s.config)
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	_, err = kube.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "bench"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("give the controller its rights: %w", err)
	}
	s.user, err = s.kubeconfig(envtest.User{Name: name, Groups: []string{"system:serviceaccounts"}})
	return err
}

// name of a figure, with the number of nodes.
func (s *scaleBench) sized(figure, unit string) string {
	return fmt.Sprintf("%s_%dnodes_%s", figure, s.nodes.n, unit)
}

// awaitPools waits until all pools are complete, and have so many slices each where
// size isn't 0. It returns when the last slice changed.
func (s *scaleBench) awaitPools(ctx context.Context, nodes int, size int64) (time.Duration, error) {
	err := s.pools.await(ctx, func(p *seenPools) bool {
		if size > 0 {
			return p.complete[size] == nodes
		}
		return p.published() == nodes
	})
	if err != nil {
		return 0, fmt.Errorf("wait for %d pools: %w", nodes, err)
	}
	_, last := s.pools.counts()
	return last, nil
}

// firstPublication starts the controller, where nothing is published, and then registers
// the plugins, as when a release is installed.
func (s *scaleBench) firstPublication(ctx context.Context) (err error) {
	start := monotonic()
	if s.running, err = startController(s.program, s.user, s.dir); err != nil {
		return err
	}
	if err := s.running.awaitLeader(ctx); err != nil {
		return err
	}
	err = s.processorTimeOf(ctx, "first_publication", func() error {
		if err := s.nodes.each(ctx, 0, s.nodes.n, s.nodes.register); err != nil {
			return err
		}
		last, err := s.awaitPools(ctx, s.nodes.n, 0)
		if err == nil {
			s.figure(s.sized("first_publication", "s"), (last - start).Seconds())
		}
		return err
	})
	if err != nil {
		return err
	}
	return s.memory(ctx, "controller")
}

// memory prints what the controller has, and has had at most.
func (s *scaleBench) memory(ctx context.Context, name string) error {
	now, peak, err := s.running.memory()
	if err != nil {
		return err
	}
	live, err := s.running.metric(ctx, "go_gc_heap_live_bytes")
	if err != nil {
		return err
	}
	s.figure(s.sized(name+"_rss", "mib"), now)
	s.figure(s.sized(name+"_peak", "mib"), peak)
	s.figure(s.sized(name+"_live_heap", "mib"), live/(1<<20))
	return nil
}

// bytes prints the size of etcd's database, and the sizes and the number of a node's slices.
func (s *scaleBench) bytes(ctx context.Context) error {
	etcd, err := scrape(ctx, s.env.ControlPlane.Etcd.URL.String()+"/metrics")
	if err != nil {
		return err
	}
	for _, m := range etcd["etcd_mvcc_db_total_size_in_use_in_bytes"].GetMetric() {
		s.figure(s.sized("etcd", "mib"), m.GetGauge().GetValue()/(1<<20))
	}
	for form, accept := range map[string]string{"json": runtime.ContentTypeJSON, "protobuf": runtime.ContentTypeProtobuf} {
		raw, err := s.kube.ResourceV1().RESTClient().Get().Resource("resourceslices").
			Param("fieldSelector", "spec.nodeName="+hollowName(0)).SetHeader("Accept", accept).DoRaw(ctx)
		if err != nil {
			return fmt.Errorf("list ResourceSlices: %w", err)
		}
		s.figure("slices_of_a_node_"+form+"_kib", float64(len(raw))/1024)
	}
	s.figure("slices_of_a_node", float64(len(s.pools.names(hollowName(0)))))
	return nil
}

// newDriver makes up a driver version that no node has had.
func (s *scaleBench) newDriver() string {
	s.drivers++
	return fmt.Sprintf("600.%d.0", s.drivers)
}

// change changes a node's report, and returns how long it took until its whole pool
// showed that.
func (s *scaleBench) change(ctx context.Context, node string) (time.Duration, error) {
	version := s.newDriver()
	start, err := s.nodes.setDriver(ctx, node, version)
	if err != nil {
		return 0, err
	}
	if err := s.pools.await(ctx, func(p *seenPools) bool { return p.shows(node, version) }); err != nil {
		return 0, fmt.Errorf("wait for the change of node %s: %w", node, err)
	}
	return monotonic() - start, nil
}

// recover deletes a node's slices, as the kubelet does when the plugin is gone, and
// returns how long it took until they were published again.
func (s *scaleBench) recover(ctx context.Context, node string) (time.Duration, error) {
	start := monotonic()
	selector := fields.Set{resourcev1.ResourceSliceSelectorNodeName: node, resourcev1.ResourceSliceSelectorDriver: driver}.String()
	if err := s.kube.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: selector}); err != nil {
		return 0, fmt.Errorf("delete the ResourceSlices of %s: %w", node, err)
	}
	gone := false
	err := s.pools.await(ctx, func(p *seenPools) bool {
		size := p.pools[node].size
		gone = gone || size == 0
		return gone && size > 0
	})
	if err != nil {
		return 0, fmt.Errorf("wait for the slices of node %s: %w", node, err)
	}
	return monotonic() - start, nil
}

func (s *scaleBench) random() string { return hollowName(rand.IntN(s.nodes.n)) }

// changes changes one node after the other, while nothing else happens.
func (s *scaleBench) changes(ctx context.Context) error {
	before, err := s.running.processorTime(ctx)
	if err != nil {
		return err
	}
	const rounds = 100
	for name, f := range map[string]func(context.Context, string) (time.Duration, error){"node_change_to_slices": s.change, "node_recovery": s.recover} {
		var took sample
		for range rounds {
			d, err := f(ctx, s.random())
			if err != nil {
				return err
			}
			took = append(took, d)
		}
		s.percentiles(fmt.Sprintf("%s_%dnodes", name, s.nodes.n), took)
	}
	after, err := s.running.processorTime(ctx)
	if err != nil {
		return err
	}
	s.figure(s.sized("node_change_cpu", "ms"), float64((after-before).Milliseconds())/(2*rounds))
	return nil
}

// policyEdit offers all GPUs as wholes only, and then again as by default, while
// single nodes change and recover.
func (s *scaleBench) policyEdit(ctx context.Context) error {
	p := &v1alpha1.SharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "bench"}}
	p.Spec.Plan.Exclusive = &v1alpha1.ExclusivePlan{}
	before := int64(len(s.pools.names(hollowName(0))))
	for _, edit := range []struct {
		name string
		do   func() error
		size int64 // slices of each pool then
	}{
		{"to_whole", func() error { return s.nodes.api.Create(ctx, p) }, 1},
		{"to_partitions", func() error { return s.nodes.api.Delete(ctx, p) }, before},
	} {
		start := monotonic()
		if err := edit.do(); err != nil {
			return fmt.Errorf("edit the policy: %w", err)
		}
		done := make(chan error, 1)
		var last time.Duration
		go func() {
			var err error
			last, err = s.awaitPools(ctx, s.nodes.n, edit.size)
			done <- err
		}()
		changed, recovered, err := s.changeUntil(ctx, done)
		if err != nil {
			return err
		}
		s.figure(s.sized("policy_edit_"+edit.name, "s"), (last - start).Seconds())
		s.percentiles(fmt.Sprintf("node_change_during_edit_%s_%dnodes", edit.name, s.nodes.n), changed)
		s.percentiles(fmt.Sprintf("node_recovery_during_edit_%s_%dnodes", edit.name, s.nodes.n), recovered)
	}
	return s.memory(ctx, "controller_after_edit")
}

// changeUntil changes and recovers nodes in turn until done, and once at least.
func (s *scaleBench) changeUntil(ctx context.Context, done <-chan error) (changed, recovered sample, err error) {
	for {
		c, err := s.change(ctx, s.random())
		if err != nil {
			return nil, nil, err
		}
		r, err := s.recover(ctx, s.random())
		if err != nil {
			return nil, nil, err
		}
		changed, recovered = append(changed, c), append(recovered, r)
		select {
		case err := <-done:
			return changed, recovered, err
		default:
		}
	}
}

// zone loses many nodes at once, and gets them back.
func (s *scaleBench) zone(ctx context.Context) error {
	lost := min(500, s.nodes.n/2)
	start := monotonic()
	if err := s.nodes.each(ctx, 0, lost, s.nodes.delete); err != nil {
		return err
	}
	last, err := s.awaitPools(ctx, s.nodes.n-lost, 0)
	if err != nil {
		return err
	}
	s.figure(fmt.Sprintf("zone_of_%d_lost_s", lost), (last - start).Seconds())
	start = monotonic()
	return s.processorTimeOf(ctx, fmt.Sprintf("zone_of_%d_back", lost), func() error {
		if err := s.nodes.each(ctx, 0, lost, s.nodes.join); err != nil {
			return err
		}
		last, err := s.awaitPools(ctx, s.nodes.n, 0)
		if err == nil {
			s.figure(fmt.Sprintf("zone_of_%d_back_s", lost), (last - start).Seconds())
		}
		return err
	})
}

// restart ends the controller and starts it again.
func (s *scaleBench) restart(ctx context.Context) (err error) {
	if err := s.running.stop(syscall.SIGTERM); err != nil {
		return err
	}
	err = s.writesOf(ctx, "controller_restart", func() error {
		start := monotonic()
		if s.running, err = startController(s.program, s.user, s.dir); err != nil {
			return err
		}
		if err := errors.Join(s.running.awaitReady(ctx), s.running.awaitLeader(ctx)); err != nil {
			return err
		}
		s.figure(s.sized("controller_restart", "s"), (monotonic() - start).Seconds())
		const late = 10 * time.Second // all nodes have been reconciled by then
		return pause(ctx, late)
	})
	if err != nil {
		return err
	}
	return s.memory(ctx, "controller_after_restart")
}

// leaderChange kills the controller while another one waits for its Lease.
func (s *scaleBench) leaderChange(ctx context.Context) error {
	next, err := startController(s.program, s.user, s.dir)
	if err != nil {
		return err
	}
	if err := next.awaitReady(ctx); err != nil {
		return err
	}
	if err := s.running.stop(syscall.SIGKILL); err != nil {
		return err
	}
	s.running = next
	took, err := s.change(ctx, s.random())
	if err != nil {
		return err
	}
	s.figure(s.sized("leader_change", "s"), took.Seconds())
	return s.memory(ctx, "controller_after_leader_change")
}

// republication starts the controller where all slices are gone, and the plugins were
// registered before: it asks each of them.
func (s *scaleBench) republication(ctx context.Context) (err error) {
	if err := s.running.stop(syscall.SIGTERM); err != nil {
		return err
	}
	if err := s.deleteAllSlices(ctx); err != nil {
		return fmt.Errorf("delete all ResourceSlices: %w", err)
	}
	if err := s.pools.await(ctx, func(p *seenPools) bool { return p.published() == 0 }); err != nil {
		return fmt.Errorf("wait for the end of all pools: %w", err)
	}
	start := monotonic()
	if s.running, err = startController(s.program, s.user, s.dir); err != nil {
		return err
	}
	if err := s.running.awaitLeader(ctx); err != nil {
		return err
	}
	return s.processorTimeOf(ctx, "republication", func() error {
		last, err := s.awaitPools(ctx, s.nodes.n, 0)
		if err == nil {
			s.figure(s.sized("republication", "s"), (last - start).Seconds())
		}
		return err
	})
}

// deleteAllSlices tries again while the server can't delete them all in the time of a request.
func (s *scaleBench) deleteAllSlices(ctx context.Context) error {
	for {
		err := s.kube.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		if !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) {
			return err
		}
	}
}

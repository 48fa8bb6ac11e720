//go:build versions

package upgrade

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/test/stack"
)

// namespace of the pods.
const namespace = "default"

// templates are those of testdata/claims.yaml.
func templates() []string { return []string{"whole", "partition", "share", "replica", "configured"} }

// hold starts a pod for each template that must run on until the end: a program that
// computes through an MPS daemon where there is one, and ends when it fails.
func (u *upgrade) hold(t *testing.T) {
	t.Helper()
	for _, template := range templates() {
		command := []string{"sleep", "infinity"}
		if template == "share" || template == "configured" {
			command = []string{"nvmlsim", "cuda", "--hold", "forever"}
		}
		u.create(t, stack.Pod("held-"+template, template, command...))
	}
	for _, template := range templates() {
		u.until(t, "^Running$", "get", "pod", "held-"+template, "-o", "jsonpath={.status.phase}")
	}
	u.held = u.heldNow(t)
	if strings.Count(u.held, "daemon ") != 2 {
		t.Fatalf("want the daemon of a share and one of a claim's own:\n%s", u.held)
	}
}

// heldNow identifies the containers of the pods that are held, and the processes of
// their daemons. Daemons of claims that come and go are left out.
func (u *upgrade) heldNow(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	var claims []string
	for _, template := range templates() {
		p, err := u.Kube().CoreV1().Pods(namespace).Get(t.Context(), "held-"+template, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range p.Status.ContainerStatuses {
			fmt.Fprintf(&b, "%s: %s, %d restarts, running %t\n", p.Name, s.ContainerID, s.RestartCount, s.State.Running != nil)
		}
		if template == "configured" {
			claims = append(claims, u.kubectl(t, "get", "resourceclaim", *p.Status.ResourceClaimStatuses[0].ResourceClaimName, "-o", "jsonpath={.metadata.uid}"))
		}
	}
	for _, name := range u.daemons(t) {
		if strings.HasPrefix(name, "gpu-") || slices.Contains(claims, strings.TrimPrefix(name, "claim-")) {
			record := u.exec(t, "cat", "/run/tessera/mps/d/"+name+"/daemon.json")
			fmt.Fprintf(&b, "daemon %s: %s\n", name, processOf(record))
		}
	}
	return b.String()
}

// daemons are the names of the MPS daemons.
func (u *upgrade) daemons(t *testing.T) []string {
	t.Helper()
	return strings.Fields(string(u.exec(t, "ls", "/run/tessera/mps/d")))
}

// comings are pods that come and go all the time.
type comings struct {
	cancel context.CancelFunc
	// last is closed when no further pod is to come.
	last chan struct{}
	done sync.WaitGroup

	mu sync.Mutex
	// ran has the pods that ended well, by template.
	ran map[string][]lifetime
	err error
}

// lifetime is the time of a pod from its creation until its container had ended.
type lifetime struct {
	began time.Time
	took  time.Duration
	// failures of prepares that the kubelet repeated.
	failures int
}

// come starts pods of each template, one after the other, until one fails.
func (u *upgrade) come(t *testing.T) *comings {
	ctx, cancel := context.WithCancel(t.Context())
	c := &comings{cancel: cancel, last: make(chan struct{}), ran: map[string][]lifetime{}}
	for _, template := range templates() {
		c.done.Go(func() {
			for i := 0; !c.isLast(); i++ {
				life, err := u.live(ctx, stack.Pod(fmt.Sprintf("%s-%d", template, i), template, "nvidia-smi", "-L"))
				if !c.add(template, life, err) {
					return
				}
			}
		})
	}
	return c
}

func (c *comings) isLast() bool {
	select {
	case <-c.last:
		return true
	default:
		return false
	}
}

// add records a pod, and reports whether it ended well.
func (c *comings) add(template string, life lifetime, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.err = errors.Join(c.err, err)
		return false
	}
	c.ran[template] = append(c.ran[template], life)
	return true
}

// live creates a pod, waits until it has succeeded, and deletes it.
func (u *upgrade) live(ctx context.Context, p *corev1.Pod) (lifetime, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	pods := u.Kube().CoreV1().Pods(namespace)
	life := lifetime{began: time.Now()}
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	if _, err := pods.Create(ctx, p, metav1.CreateOptions{}); err != nil {
		return life, err
	}
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		now, err := pods.Get(ctx, p.Name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		if now.Status.Phase == corev1.PodFailed {
			return false, fmt.Errorf("it failed: %+v", now.Status)
		}
		return now.Status.Phase == corev1.PodSucceeded, nil
	})
	life.took = time.Since(life.began)
	events := u.events(ctx, p.Name)
	if err != nil {
		return life, fmt.Errorf("pod %s: %w; events: %+v", p.Name, err, events)
	}
	for _, e := range events {
		if e.Reason == "FailedPrepareDynamicResources" {
			life.failures += int(max(e.Count, 1))
		}
	}
	if err := pods.Delete(ctx, p.Name, metav1.DeleteOptions{}); err != nil {
		return life, err
	}
	return life, wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		_, err := pods.Get(ctx, p.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), nil
	})
}

// events of a pod.
func (u *upgrade) events(ctx context.Context, pod string) []corev1.Event {
	list, err := u.Kube().CoreV1().Events(namespace).List(context.WithoutCancel(ctx), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
	if err != nil {
		return []corev1.Event{{Message: err.Error()}}
	}
	return list.Items
}

// since returns the pods that were created after a time and have run.
func (c *comings) since(at time.Time) (map[string][]lifetime, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := map[string][]lifetime{}
	for template, lives := range c.ran {
		for _, l := range lives {
			if l.began.After(at) {
				all[template] = append(all[template], l)
			}
		}
	}
	return all, c.err
}

// runAfter waits until a pod of each template that was created after the time has run.
func (c *comings) runAfter(t *testing.T, at time.Time) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, 2*patience, true, func(context.Context) (bool, error) {
		all, err := c.since(at)
		return len(all) == len(templates()), err
	})
	if err != nil {
		all, _ := c.since(at)
		t.Fatalf("pods that came after the step: %v ran: %v", slices.Sorted(maps.Keys(all)), err)
	}
}

// report says how many pods ran since the time, how long the slowest took, and how many
// prepares failed and were repeated.
func (c *comings) report(at time.Time) string {
	all, _ := c.since(at)
	count, failures, slowest := 0, 0, time.Duration(0)
	for _, lives := range all {
		for _, l := range lives {
			count++
			failures += l.failures
			slowest = max(slowest, l.took)
		}
	}
	return fmt.Sprintf("%d pods ran, the slowest took %s, %d prepares were repeated", count, slowest.Round(100*time.Millisecond), failures)
}

// end waits until the last pods have ended, and returns all errors of pods.
func (c *comings) end() error {
	close(c.last)
	c.done.Wait()
	return c.err
}

// abort ends the pods' goroutines without waiting for their pods.
func (c *comings) abort() {
	c.cancel()
	c.done.Wait()
}

func (u *upgrade) create(t *testing.T, p *corev1.Pod) {
	t.Helper()
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	if _, err := u.Kube().CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

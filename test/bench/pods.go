package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

const template = "one-gpu"

// createTemplate makes the claim template that the pods use.
func createTemplate(ctx context.Context, kube kubernetes.Interface) error {
	t := &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: template},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{
				Name:    "gpu",
				Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: driver},
			}},
		}}},
	}
	if _, err := kube.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, t, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create claim template: %w", err)
	}
	return nil
}

// newPod sleeps until it is told to end. Where claim is set, it has one GPU:
// of the template, or of the claim named.
func newPod(name, image, node string, claim *corev1.PodResourceClaim) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			NodeSelector:                  map[string]string{corev1.LabelHostname: node},
			Containers: []corev1.Container{{
				Name: "main", Image: image, ImagePullPolicy: corev1.PullIfNotPresent,
				Command: []string{"sleep", marker(name)},
			}},
		},
	}
	if claim != nil {
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{*claim}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: claim.Name}}
	}
	return pod
}

// marker is a sleep time that finds the pod's process on the host.
func marker(pod string) string {
	n := 1_000_000
	for _, c := range pod {
		n = n*31%9_000_000 + int(c)
	}
	return fmt.Sprint(n)
}

func fromTemplate() *corev1.PodResourceClaim {
	return &corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new(template)}
}

// startPod creates a pod and returns how long it took to be seen running.
func startPod(ctx context.Context, kube kubernetes.Interface, pod *corev1.Pod) (time.Duration, error) {
	_, took, err := startBoundPod(ctx, kube, pod)
	return took, err
}

// startBoundPod creates a pod and returns how long it took to be seen bound to a
// node, and running.
func startBoundPod(ctx context.Context, kube kubernetes.Interface, pod *corev1.Pod) (bound, running time.Duration, err error) {
	w, err := watchPod(ctx, kube, pod.Name)
	if err != nil {
		return 0, 0, err
	}
	defer w.Stop()
	start := time.Now()
	if _, err := kube.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return 0, 0, fmt.Errorf("create pod %s: %w", pod.Name, err)
	}
	err = until(ctx, w, func(_ watch.EventType, p *corev1.Pod) bool {
		if bound == 0 && p.Spec.NodeName != "" {
			bound = time.Since(start)
		}
		return p.Status.Phase == corev1.PodRunning
	})
	if err != nil {
		return 0, 0, fmt.Errorf("wait for pod %s to run: %w", pod.Name, err)
	}
	return bound, time.Since(start), nil
}

// watchPod watches one pod, which need not exist yet.
func watchPod(ctx context.Context, kube kubernetes.Interface, name string) (watch.Interface, error) {
	w, err := kube.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()})
	if err != nil {
		return nil, fmt.Errorf("watch pod %s: %w", name, err)
	}
	return w, nil
}

// until returns nil at the first event that is wanted, and an error when the
// watch or the context ends before it.
func until(ctx context.Context, w watch.Interface, wanted func(watch.EventType, *corev1.Pod) bool) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-w.ResultChan():
			if !ok {
				return errors.New("the watch ended")
			}
			if p, ok := e.Object.(*corev1.Pod); ok && wanted(e.Type, p) {
				return nil
			}
		}
	}
}

// deletePod deletes a pod and waits until it is gone.
func deletePod(ctx context.Context, kube kubernetes.Interface, name string) error {
	w, err := watchPod(ctx, kube, name)
	if err != nil {
		return err
	}
	defer w.Stop()
	if err := kube.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete pod %s: %w", name, err)
	}
	if err := until(ctx, w, func(t watch.EventType, _ *corev1.Pod) bool { return t == watch.Deleted }); err != nil {
		return fmt.Errorf("wait for pod %s to go: %w", name, err)
	}
	return nil
}

// handover force-deletes a pod whose GPU another pod waits for, and returns
// the time from the end of the old container to the new pod running. It is
// negative where the kubelet gave the GPU up before the container had ended:
// its DRA manager reconciles once a minute, and takes a force-deleted pod for
// gone while it is still being terminated (kubernetes v1.37.1,
// pkg/kubelet/cm/dra/manager.go: reconcileLoop; GetActivePods).
func handover(ctx context.Context, kube kubernetes.Interface, image, node string, round int, claim *corev1.PodResourceClaim) (time.Duration, error) {
	before, after := fmt.Sprintf("handover-old-%d", round), fmt.Sprintf("handover-new-%d", round)
	if _, err := startPod(ctx, kube, newPod(before, image, node, claim)); err != nil {
		return 0, err
	}
	process, err := findProcess(marker(before))
	if err != nil {
		return 0, err
	}
	running := make(chan error, 1)
	var ranAt time.Time
	go func() {
		_, err := startPod(ctx, kube, newPod(after, image, node, claim))
		ranAt = time.Now()
		running <- err
	}()
	if err := waitScheduling(ctx, kube, after); err != nil {
		return 0, err
	}
	if err := kube.CoreV1().Pods(namespace).Delete(ctx, before, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		return 0, fmt.Errorf("force-delete pod %s: %w", before, err)
	}
	goneAt, err := waitGone(ctx, process)
	if err != nil {
		return 0, err
	}
	if err := <-running; err != nil {
		return 0, err
	}
	return ranAt.Sub(goneAt), deletePod(ctx, kube, after)
}

// claimFor makes a claim template that only one GPU satisfies.
func claimFor(ctx context.Context, kube kubernetes.Interface, gpuUUID string) (*corev1.PodResourceClaim, error) {
	t := &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "this-gpu-"},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{
				Name: "gpu",
				Exactly: &resourcev1.ExactDeviceRequest{
					DeviceClassName: driver,
					Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
						Expression: fmt.Sprintf("device.attributes[%q].uuid == %q", driver, gpuUUID),
					}}},
				},
			}},
		}}},
	}
	t, err := kube.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, t, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create claim template for %s: %w", gpuUUID, err)
	}
	return &corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: &t.Name}, nil
}

// waitScheduling waits until the scheduler has found no room for a pod.
func waitScheduling(ctx context.Context, kube kubernetes.Interface, name string) error {
	w, err := watchPod(ctx, kube, name)
	if err != nil {
		return err
	}
	defer w.Stop()
	err = until(ctx, w, func(_ watch.EventType, p *corev1.Pod) bool {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				return true
			}
		}
		return false
	})
	if err != nil {
		return fmt.Errorf("wait for pod %s to be found unschedulable: %w", name, err)
	}
	return nil
}

// findProcess returns the /proc directory of the process that sleeps for the
// given time.
func findProcess(seconds string) (string, error) {
	found, err := findCommands(func(args []string) bool {
		return len(args) == 2 && filepath.Base(args[0]) == "sleep" && args[1] == seconds
	})
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// findCommands returns the /proc directories of all processes with such a
// command line, at least one.
func findCommands(match func(args []string) bool) ([]string, error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	var found []string
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue // the process has ended meanwhile
		}
		if match(strings.Split(strings.TrimRight(string(raw), "\x00"), "\x00")) {
			found = append(found, filepath.Dir(f))
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no such process on this host")
	}
	return found, nil
}

// waitGone returns when the process was first seen gone.
func waitGone(ctx context.Context, process string) (time.Time, error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if raw, err := os.ReadFile(filepath.Join(process, "cmdline")); err != nil || len(raw) == 0 {
			return time.Now(), nil
		}
		select {
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("wait for process %s to end: %w", process, ctx.Err())
		case <-tick.C:
		}
	}
}

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/test/stack"
)

// distinct waits until so many pods with a label run at the same time, and
// checks that each sees exactly one MIG device, the one its claim was given,
// and no two the same. The pods' first container prints the output of
// nvidia-smi -L. It prints "POD PROFILE UUID" for each.
//
//	distinct TIMEOUT LABEL COUNT
func distinct(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: distinct TIMEOUT LABEL COUNT")
	}
	timeout, err := time.ParseDuration(args[0])
	ts.Check(err)
	count, err := strconv.Atoi(args[2])
	ts.Check(err)
	var lines []string
	for deadline := time.Now().Add(timeout); ; time.Sleep(pause) {
		lines, err = eachItsOwn(s, ts.Getenv("NS"), args[1], count)
		if err == nil || !errors.Is(err, errNotYet) || time.Now().After(deadline) {
			break
		}
	}
	ts.Check(err)
	_, err = fmt.Fprintln(ts.Stdout(), strings.Join(lines, "\n"))
	ts.Check(err)
}

var errNotYet = errors.New("not yet")

func eachItsOwn(s *stack.Stack, namespace, label string, count int) ([]string, error) {
	ctx := context.Background()
	list, err := s.Kube().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: label})
	if err != nil {
		return nil, err
	}
	var waiting []string
	for _, p := range list.Items {
		if p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil {
			waiting = append(waiting, p.Name)
		}
	}
	if len(waiting) > 0 || len(list.Items) != count {
		return nil, fmt.Errorf("%w: %d pods, wanted %d; of them don't run: %v", errNotYet, len(list.Items), count, waiting)
	}
	devices, err := devicesByName(ctx, s)
	if err != nil {
		return nil, err
	}
	var lines []string
	holder := map[string]string{}
	for _, p := range list.Items {
		d, err := ownPartition(ctx, s, &p, devices)
		if err != nil {
			return nil, fmt.Errorf("pod %s: %w", p.Name, err)
		}
		if other, taken := holder[d.mig.UUID]; taken {
			return nil, fmt.Errorf("pods %s and %s both have %s", other, p.Name, d.mig.UUID)
		}
		holder[d.mig.UUID] = p.Name
		lines = append(lines, fmt.Sprintf("%s %s %s", p.Name, d.profile, d.mig.UUID))
	}
	return lines, nil
}

// ownPartition is the one partition that a pod was given and sees.
func ownPartition(ctx context.Context, s *stack.Stack, p *corev1.Pod, devices map[string]allocatedDevice) (allocatedDevice, error) {
	container := p.Spec.Containers[0].Name
	out, err := s.Kube().CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	if err != nil {
		return allocatedDevice{}, err
	}
	seen := listed(string(out))
	if len(seen) == 0 && !strings.Contains(string(out), "No devices") {
		return allocatedDevice{}, fmt.Errorf("%w: it has printed %q", errNotYet, out)
	}
	got, err := given(ctx, s, p, container, devices)
	if errors.Is(err, errNoStatus) {
		return allocatedDevice{}, fmt.Errorf("%w: %w", errNotYet, err)
	}
	if err != nil {
		return allocatedDevice{}, err
	}
	if len(got) == 1 && got[0].mig != nil && got[0].mig.UUID == "" && len(seen) == 2 {
		got[0].mig.UUID = seen[1]
	}
	if len(got) != 1 || got[0].mig == nil || len(seen) != 2 || seen[0] != got[0].gpu || seen[1] != got[0].mig.UUID {
		return allocatedDevice{}, fmt.Errorf("it was given %+v, and sees %v", got, seen)
	}
	return got[0], nil
}

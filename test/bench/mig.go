package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/sim/cluster"
)

const (
	// migGPUs is how many GPUs the node has that MIG is measured on, and
	// migProfile what they are cut into, migEach of each.
	migGPUs    = 8
	migProfile = "1g.10gb"
	migEach    = 7
	// How long the simulated hardware takes; a guess at what real one does.
	migCreate  = 200 * time.Millisecond
	migDestroy = time.Second
)

// mig measures partitions that are made for claims, over the plugin's socket,
// as the kubelet asks for them.
func (b *bench) mig(ctx context.Context) error {
	if b.real {
		return nil // don't partition real hardware
	}
	node := b.stack.Cluster.Nodes()[1]
	p, err := b.dial(node)
	if err != nil {
		return err
	}
	defer p.close()
	var devices []string
	for _, d := range b.partitions {
		if *d.Attributes["profile"].StringValue == migProfile {
			devices = append(devices, d.Name)
		}
	}
	if len(devices) != migGPUs*migEach {
		return fmt.Errorf("node %s offers %d partitions %s, want %d", node, len(devices), migProfile, migGPUs*migEach)
	}
	claims, err := allocatedClaims(ctx, b.stack.Kube(), node, devices)
	if err != nil {
		return err
	}
	if err := b.fillAtOnce(ctx, p, node, claims); err != nil {
		return err
	}
	cold, err := b.oneByOne(ctx, p, node, claims[0])
	if err != nil {
		return err
	}
	if err := b.keptWarm(ctx, p, node, claims[0], cold); err != nil {
		return err
	}
	if err := b.hardware(ctx, node, "latency", "none"); err != nil {
		return err
	}
	return b.deleteClaims(ctx)
}

// fillAtOnce prepares a claim for every partition at the same time. The ideal
// is the time of the hardware alone: the GPUs in parallel, one partition after
// the other on each.
func (b *bench) fillAtOnce(ctx context.Context, p *plugin, node string, claims []*resourcev1.ResourceClaim) error {
	if err := b.latency(ctx, node, migDestroy); err != nil {
		return err
	}
	b.progress("making %d partitions at once", len(claims))
	var ratios []float64
	for range 3 {
		s, err := measure(1, func() error {
			return together(claims, func(c *resourcev1.ResourceClaim) error { return p.prepare(ctx, c) })
		})
		if err != nil {
			return err
		}
		ratios = append(ratios, s[0].Seconds()/(migEach*migCreate).Seconds())
		if err := together(claims, func(c *resourcev1.ResourceClaim) error { return p.unprepare(ctx, c) }); err != nil {
			return err
		}
	}
	slices.Sort(ratios)
	b.figure(fmt.Sprintf("mig_%d_at_once_ratio", len(claims)), ratios[1])
	return nil
}

// oneByOne makes one partition again and again, and returns how long that took.
func (b *bench) oneByOne(ctx context.Context, p *plugin, node string, c *resourcev1.ResourceClaim) (sample, error) {
	if err := b.latency(ctx, node, 0); err != nil {
		return nil, err
	}
	b.progress("making one partition %d times, %v each", b.rounds, migCreate)
	cold, _, err := measureRounds(ctx, p, []*resourcev1.ResourceClaim{c}, b.rounds)
	if err != nil {
		return nil, err
	}
	own := make(sample, 0, len(cold))
	for _, took := range cold {
		own = append(own, took-migCreate)
	}
	b.percentiles("mig_own_share", own)
	return cold, nil
}

// keptWarm does the same where a policy keeps idle partitions.
func (b *bench) keptWarm(ctx context.Context, p *plugin, node string, c *resourcev1.ResourceClaim, cold sample) error {
	const policy = `{apiVersion: gpu.tessera.dev/v1alpha1, kind: SharingPolicy, metadata: {name: warm},
spec: {nodeSelector: {matchLabels: {kubernetes.io/hostname: %s}}, plan: {partitioned: {profiles: [%s], keepWarm: 60s}}}}`
	if err := b.applyPolicy(ctx, fmt.Sprintf(policy, node, migProfile)); err != nil {
		return err
	}
	one := func() (time.Duration, error) {
		s, err := measure(1, func() error { return p.prepare(ctx, c) })
		return s[0], errors.Join(err, p.unprepare(ctx, c))
	}
	// The first one that was found warm says that the policy has reached the node.
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		took, err := one()
		return took < migCreate, err
	})
	if err != nil {
		return fmt.Errorf("wait for a partition to be kept: %w", err)
	}
	warm, _, err := measureRounds(ctx, p, []*resourcev1.ResourceClaim{c}, b.rounds)
	if err != nil {
		return err
	}
	b.figure("mig_warm_to_cold_ratio", warm.percentile(50)/cold.percentile(50))
	_, err = b.stack.Kubectl(ctx, "delete", "sharingpolicy", "warm")
	return err
}

// latency sets how long the simulated hardware takes.
func (b *bench) latency(ctx context.Context, node string, destroy time.Duration) error {
	return b.hardware(ctx, node, "latency", "--create", migCreate.String(), "--destroy", destroy.String())
}

// applyPolicy creates a SharingPolicy, or changes it.
func (b *bench) applyPolicy(ctx context.Context, policy string) error {
	cmd := b.stack.Command(ctx, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(policy)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apply a policy: %w: %s", err, out)
	}
	return nil
}

// hardware runs the simulator's command on a node.
func (b *bench) hardware(ctx context.Context, node string, args ...string) error {
	if err := b.stack.Simulator(ctx, node, cluster.Stdio{Err: os.Stderr}, args...); err != nil {
		return fmt.Errorf("nvmlsim %s on %s: %w", strings.Join(args, " "), node, err)
	}
	return nil
}

package main

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// mpsShares is how many shares the GPU has that MPS is measured on.
	mpsShares = 4
	// mpsRounds bounds the cold prepares: each starts and ends an MPS daemon.
	mpsRounds = 60
)

// mps measures shares of one GPU over the plugin's socket, as the kubelet asks
// for them: the first of a GPU, for which an MPS daemon is started, and one
// beside another. Whole-GPU prepares of the same GPU are what they are compared
// with.
func (b *bench) mps(ctx context.Context) error {
	gpu := b.devices[0]
	shares, err := b.cutIntoShares(ctx, *gpu.Attributes["uuid"].StringValue)
	if err != nil {
		return err
	}
	p, err := b.dial(b.node)
	if err != nil {
		return err
	}
	defer p.close()
	claims, err := allocatedClaims(ctx, b.stack.Kube(), b.node, []string{gpu.Name, shares[0], shares[1]})
	if err != nil {
		return err
	}
	if err := b.wholeColdWarm(ctx, p, claims[0], claims[1], claims[2]); err != nil {
		return err
	}
	if err := b.deleteClaims(ctx); err != nil {
		return err
	}
	return b.undivided(ctx)
}

// wholeColdWarm measures prepares of a GPU as a whole, of its only share, and
// of another share beside that one.
func (b *bench) wholeColdWarm(ctx context.Context, p *plugin, whole, share, beside *resourcev1.ResourceClaim) error {
	undisturbed, _, err := measureRounds(ctx, p, []*resourcev1.ResourceClaim{whole}, b.rounds)
	if err != nil {
		return err
	}
	rounds := min(b.rounds, mpsRounds)
	b.progress("starting and ending an MPS daemon %d times", rounds)
	cold, down, next, err := measureCold(ctx, p, share, whole, rounds)
	if err != nil {
		return err
	}
	b.phases(ctx)
	if err := p.prepare(ctx, share); err != nil {
		return err
	}
	warm, leave, err := measureRounds(ctx, p, []*resourcev1.ResourceClaim{beside}, b.rounds)
	if err != nil {
		return err
	}
	b.figure("mps_prepare_whole_p50_ms", undisturbed.percentile(50))
	b.percentiles("mps_prepare_cold", cold)
	b.percentiles("mps_prepare_warm", warm)
	b.percentiles("mps_unprepare_last", down)
	b.percentiles("mps_prepare_after_last", next)
	b.percentiles("mps_unprepare_beside", leave)
	b.figure("mps_cold_to_whole_ratio", cold.percentile(50)/undisturbed.percentile(50))
	b.figure("mps_warm_to_whole_ratio", warm.percentile(50)/undisturbed.percentile(50))
	return p.unprepare(ctx, share)
}

// measureCold measures prepares and unprepares of a GPU's only share, and prepares
// of the whole GPU right after: these wait for the end of the MPS daemon, so that
// the next cold prepare doesn't.
func measureCold(ctx context.Context, p *plugin, share, whole *resourcev1.ResourceClaim, rounds int) (cold, down, next sample, err error) {
	for range rounds {
		for _, step := range []struct {
			into *sample
			do   func() error
		}{
			{&cold, func() error { return p.prepare(ctx, share) }},
			{&down, func() error { return p.unprepare(ctx, share) }},
			{&next, func() error { return p.prepare(ctx, whole) }},
			{new(sample), func() error { return p.unprepare(ctx, whole) }},
		} {
			s, err := measure(1, step.do)
			if err != nil {
				return nil, nil, nil, err
			}
			*step.into = append(*step.into, s...)
		}
	}
	return cold, down, next, nil
}

// phaseLine is the sum or the count of one phase among the supervisor's metrics.
var phaseLine = regexp.MustCompile(`(?m)^tessera_mps_supervisor_phase_duration_seconds_(sum|count)\{phase="(\w+)"\} (\S+)$`)

// phases reports how long the node's supervisor took for each phase of starting and
// stopping daemons, on average, where its metrics can be reached.
func (b *bench) phases(ctx context.Context) {
	pods, err := b.stack.Kubectl(ctx, "get", "pods", "-A", "-l", "app.kubernetes.io/component=mps", "--field-selector", "spec.nodeName="+b.node,
		"-o", "jsonpath={.items[0].metadata.namespace}/pods/{.items[0].metadata.name}")
	var text string
	if err == nil {
		text, err = b.stack.Kubectl(ctx, "get", "--raw", "/api/v1/namespaces/"+pods+":8081/proxy/metrics")
	}
	if err != nil {
		b.progress("the supervisor's phases aren't known: %v", err)
		return
	}
	sums, counts := map[string]float64{}, map[string]float64{}
	for _, m := range phaseLine.FindAllStringSubmatch(text, -1) {
		value, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			continue
		}
		if m[1] == "sum" {
			sums[m[2]] = value
		} else {
			counts[m[2]] = value
		}
	}
	for phase, n := range counts {
		b.progress("the supervisor's phase %s took %.1f ms on average", phase, 1000*sums[phase]/n)
	}
}

// cutIntoShares applies a policy that one GPU be offered in MPS shares, and
// returns their names when they are offered.
func (b *bench) cutIntoShares(ctx context.Context, gpuUUID string) ([]string, error) {
	const policy = `{apiVersion: gpu.tessera.dev/v1alpha1, kind: SharingPolicy, metadata: {name: shares},
spec: {gpuSelector: 'device.attributes["gpu.nvidia.com"].uuid == "%s"', plan: {mps: {shares: %d}}}}`
	if err := b.applyPolicy(ctx, fmt.Sprintf(policy, gpuUUID, mpsShares)); err != nil {
		return nil, err
	}
	devices, err := b.await(ctx, b.node, "mps", mpsShares)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, d := range devices {
		names = append(names, d.Name)
	}
	return names, nil
}

// undivided takes the policy away and waits until the shares are withdrawn, so
// that what is measured next finds the node as it was.
func (b *bench) undivided(ctx context.Context) error {
	if _, err := b.stack.Kubectl(ctx, "delete", "sharingpolicy", "shares"); err != nil {
		return err
	}
	left := 0
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		list, err := b.stack.Kube().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourcev1.ResourceSliceSelectorNodeName + "=" + b.node})
		if err != nil {
			return false, err
		}
		left = len(ofType(list.Items, "mps"))
		return left == 0, nil
	})
	if err != nil {
		return fmt.Errorf("wait until %d shares on %s are withdrawn: %w", left, b.node, err)
	}
	return nil
}

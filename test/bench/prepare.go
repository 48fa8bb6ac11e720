package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// journal measures what one durable write of a small file costs on this disk,
// two fsyncs: the floor of a prepare.
func (b *bench) journal(context.Context) error {
	dir := filepath.Join(b.stack.Cluster.NodeDir(b.node), "var/lib/tessera", ".bench")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("measure the journal's writes: %w", err)
	}
	defer os.RemoveAll(dir)
	s, err := measure(b.rounds, func() error { return durable(dir) })
	if err != nil {
		return fmt.Errorf("measure the journal's writes: %w", err)
	}
	b.percentiles("journal_write", s)
	return nil
}

// durable writes as the journal does: temporary file, fsync, rename, fsync of
// the directory.
func durable(dir string) error {
	tmp := filepath.Join(dir, "record.tmp")
	f, err := os.Create(tmp)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(strings.Repeat("x", 600)); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, "record")); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// prepares measures one claim at a time while more and more others are
// prepared.
func (b *bench) prepares(ctx context.Context) error {
	p, err := b.dial(b.node)
	if err != nil {
		return err
	}
	defer p.close()
	var names []string
	for _, d := range b.devices {
		names = append(names, d.Name)
	}
	b.progress("allocating %d claims", len(names))
	claims, err := allocatedClaims(ctx, b.stack.Kube(), b.node, names)
	if err != nil {
		return err
	}
	spare := max(len(claims)-8, 0)
	measured, others := claims[spare:], claims[:spare]
	p50 := map[int]float64{}
	done := 0
	for _, n := range []int{0, 8, 56, 112} {
		if n > len(others) {
			break
		}
		for ; done < n; done++ {
			if err := p.prepare(ctx, others[done]); err != nil {
				return err
			}
		}
		prep, unprep, floor, err := b.measurePrepares(ctx, p, measured)
		if err != nil {
			return err
		}
		if n == 0 {
			b.figure("prepare_floor_p50_ms", floor.percentile(50))
			b.figure("prepare_floor_ratio", prep.percentile(50)/floor.percentile(50))
		}
		b.percentiles(fmt.Sprintf("prepare_%d", n), prep)
		b.percentiles(fmt.Sprintf("unprepare_%d", n), unprep)
		p50[n] = prep.percentile(50)
	}
	if p50[112] > 0 {
		b.figure("prepare_ratio_112_to_0", p50[112]/p50[0])
	}
	for _, c := range others[:done] {
		if err := p.unprepare(ctx, c); err != nil {
			return err
		}
	}
	return b.deleteClaims(ctx)
}

// measurePrepares measures prepares and unprepares, and between them their floor:
// one durable write and one GET of a claim, which every prepare makes.
func (b *bench) measurePrepares(ctx context.Context, p *plugin, claims []*resourcev1.ResourceClaim) (prep, unprep, floor sample, err error) {
	dir := filepath.Join(b.stack.Cluster.NodeDir(b.node), "var/lib/tessera", ".bench")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, nil, fmt.Errorf("measure the floor of a prepare: %w", err)
	}
	defer os.RemoveAll(dir)
	for i := range b.rounds {
		one, two, err := measureRounds(ctx, p, claims[i%len(claims):][:1], 1)
		if err != nil {
			return nil, nil, nil, err
		}
		both, err := measure(1, func() error { return b.floor(ctx, dir, claims[i%len(claims)].Name) })
		if err != nil {
			return nil, nil, nil, fmt.Errorf("measure the floor of a prepare: %w", err)
		}
		prep, unprep, floor = append(prep, one...), append(unprep, two...), append(floor, both...)
	}
	return prep, unprep, floor, nil
}

// floor measures the work that every prepare must do.
func (b *bench) floor(ctx context.Context, dir, claim string) error {
	if _, err := b.stack.Kube().ResourceV1().ResourceClaims(namespace).Get(ctx, claim, metav1.GetOptions{}); err != nil {
		return err
	}
	return durable(dir)
}

// measureRounds prepares and unprepares one claim after the other.
func measureRounds(ctx context.Context, p *plugin, claims []*resourcev1.ResourceClaim, rounds int) (prep, unprep sample, err error) {
	for i := range rounds {
		c := claims[i%len(claims)]
		s, err := measure(1, func() error { return p.prepare(ctx, c) })
		if err != nil {
			return nil, nil, err
		}
		prep = append(prep, s...)
		s, err = measure(1, func() error { return p.unprepare(ctx, c) })
		if err != nil {
			return nil, nil, err
		}
		unprep = append(unprep, s...)
	}
	return prep, unprep, nil
}

func (b *bench) deleteClaims(ctx context.Context) error {
	err := b.stack.Kube().ResourceV1().ResourceClaims(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("delete claims: %w", err)
	}
	return nil
}

// atOnce measures eight prepares that start together, until the last is done.
func (b *bench) atOnce(ctx context.Context) error {
	if len(b.devices) < 8 {
		return nil
	}
	p, err := b.dial(b.node)
	if err != nil {
		return err
	}
	defer p.close()
	var names []string
	for _, d := range b.devices[:8] {
		names = append(names, d.Name)
	}
	claims, err := allocatedClaims(ctx, b.stack.Kube(), b.node, names)
	if err != nil {
		return err
	}
	var all sample
	for range 20 {
		s, err := measure(1, func() error {
			return together(claims, func(c *resourcev1.ResourceClaim) error { return p.prepare(ctx, c) })
		})
		if err != nil {
			return err
		}
		all = append(all, s...)
		if err := together(claims, func(c *resourcev1.ResourceClaim) error { return p.unprepare(ctx, c) }); err != nil {
			return err
		}
	}
	b.figure("prepare_8_at_once_ms", all.percentile(50))
	return b.deleteClaims(ctx)
}

// together calls f for all of them at the same time, and returns one of the
// errors when all are done.
func together[T any](all []T, f func(T) error) error {
	errs := make(chan error, len(all))
	for _, c := range all {
		go func() { errs <- f(c) }()
	}
	var first error
	for range all {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/test/stack"
)

// rolloutGap measures how long a call of the kubelet waits while a rollout replaces the node's
// plugin: for each rollout, the longest of the prepares and unprepares that follow each other
// meanwhile. Which of the two meets the moment is chance, and both wait for the same.
func (b *bench) rolloutGap(ctx context.Context) error {
	claims, err := allocatedClaims(ctx, b.stack.Kube(), b.node, []string{b.devices[0].Name})
	if err != nil {
		return err
	}
	var gaps, all sample
	for round := range b.rollouts {
		calls, err := b.callDuringRollout(ctx, claims[0])
		if err != nil {
			return fmt.Errorf("rollout %d: %w", round, err)
		}
		longest := slices.Max(calls)
		b.progress("rollout %d: %d calls, the longest took %v", round, len(calls), longest)
		gaps, all = append(gaps, longest), append(all, calls...)
	}
	b.figure("rollout_calls", float64(len(all)))
	b.figure("rollout_call_p50_ms", all.percentile(50))
	b.figure("rollout_prepare_gap_p50_ms", gaps.percentile(50))
	b.figure("rollout_prepare_gap_p99_ms", gaps.percentile(99))
	return b.deleteClaims(ctx)
}

// callDuringRollout prepares and unprepares the claim from before a rollout until after it,
// and returns how long each call took. A call that fails is an error.
func (b *bench) callDuringRollout(ctx context.Context, c *resourcev1.ResourceClaim) (took sample, err error) {
	done := make(chan error, 1)
	go func() {
		const set = "daemonset/tessera-node"
		_, restartErr := b.stack.Kubectl(ctx, "rollout", "restart", "--namespace", stack.Namespace, set)
		_, statusErr := b.stack.Kubectl(ctx, "rollout", "status", "--namespace", stack.Namespace, set, "--timeout=5m")
		done <- errors.Join(restartErr, statusErr)
	}()
	for {
		for _, call := range []func(*plugin, context.Context, *resourcev1.ResourceClaim) error{(*plugin).prepare, (*plugin).unprepare} {
			began := monotonic()
			if err := b.callOldest(func(p *plugin) error { return call(p, ctx, c) }); err != nil {
				return nil, err
			}
			took = append(took, monotonic()-began)
		}
		select {
		case err := <-done:
			return took, err
		default:
		}
	}
}

// callOldest calls the plugin of the node that runs longest: the one that hands over, until
// its socket is gone. That is the longest way, which the kubelet takes until it has
// registered the next plugin.
func (b *bench) callOldest(call func(*plugin) error) error {
	for {
		sockets, err := b.sockets(b.node)
		if err != nil {
			return err
		}
		p, err := dialPlugin(sockets[0])
		if err != nil {
			return err
		}
		err = call(p)
		p.close()
		_, gone := os.Stat(sockets[0])
		if status.Code(errors.Unwrap(err)) == codes.Unavailable && os.IsNotExist(gone) {
			continue // the kubelet knows before that the plugin goes
		}
		return err
	}
}

// sockets returns the sockets of a node's plugins, the oldest first.
func (b *bench) sockets(node string) ([]string, error) {
	pattern := filepath.Join(b.stack.Cluster.NodeDir(node), "var/lib/kubelet/plugins", driver, "dra*.sock")
	sockets, err := filepath.Glob(pattern)
	if err != nil {
		return nil, fmt.Errorf("find the plugin's sockets: %w", err)
	}
	if len(sockets) == 0 {
		return nil, fmt.Errorf("no plugin has a socket %s", pattern)
	}
	made := map[string]time.Time{}
	for _, s := range sockets {
		if info, err := os.Stat(s); err == nil {
			made[s] = info.ModTime()
		}
	}
	slices.SortFunc(sockets, func(a, b string) int { return cmp.Or(made[a].Compare(made[b]), cmp.Compare(a, b)) })
	return sockets, nil
}

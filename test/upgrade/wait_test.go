//go:build versions

package upgrade

import (
	"context"
	"regexp"
	"strings"
	"testing"
	"time"
)

// patience is how long the cluster may take to do something.
const patience = 2 * time.Minute

// kubectl runs kubectl, which must end within patience.
func (u *upgrade) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := u.Kubectl(ctx, args...)
	if ctx.Err() != nil {
		t.Fatalf("kubectl %s: still running after %s: %s", strings.Join(args, " "), patience, out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// exec runs a program on the node, which must end within patience.
func (u *upgrade) exec(t *testing.T, command ...string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := u.Cluster.Exec(ctx, node, command...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// until repeats kubectl until it succeeds and prints something that matches. Each try and
// all together must end within patience.
func (u *upgrade) until(t *testing.T, pattern string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	want := regexp.MustCompile(pattern)
	for {
		out, err := u.Kubectl(ctx, args...)
		if err == nil && want.MatchString(strings.TrimSpace(out)) {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("kubectl %s: not what was wanted after %s, which is %q: %v: %s", strings.Join(args, " "), patience, pattern, err, out)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// since returns how long ago a time was, for people.
func since(began time.Time) time.Duration { return time.Since(began).Round(100 * time.Millisecond) }

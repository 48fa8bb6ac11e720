package supervisor

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tessera-dra/tessera/pkg/mps"
)

var anyRevision = cmpopts.IgnoreFields(mps.State{}, "Revision")

// The revision grows with every change, over replies, reports and supervisors. After
// each change comes a report that isn't older than the reply.
func TestRevisions(t *testing.T) {
	n := newNode(t)
	n.start("")
	var last mps.Revision
	grows := func(of string, next mps.Revision, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", of, err)
		}
		if next <= last {
			t.Errorf("%s: revision %d after %d", of, next, last)
		}
		last = next
	}
	reported := func() {
		t.Helper()
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errTimeout)
		defer cancel()
		seen := mps.Revision(0)
		_ = n.Watch(ctx, func(r mps.Report) {
			if seen = r.Revision; seen >= last {
				cancel()
			}
		})
		if seen < last {
			t.Errorf("%v: the last report has revision %d, a reply %d", context.Cause(ctx), seen, last)
		}
	}
	s, err := n.Ensure(t.Context(), one("a"))
	grows("a start", s.Revision, err)
	reported()
	_, revision, err := n.BeginStop(t.Context(), "a")
	grows("the beginning of a stop", revision, err)
	reported()
	s, err = n.Ensure(t.Context(), one("a"))
	grows("a second start", s.Revision, err)
	n.kill()
	n.start("")
	r, err := n.List(t.Context())
	grows("the list of the next supervisor", r.Revision, err)
	if len(r.Daemons) != 1 || r.Daemons[0].Revision != r.Revision {
		t.Errorf("revision %d has %+v", r.Revision, r.Daemons)
	}
	revision, err = n.Stop(t.Context(), "a")
	grows("a stop", revision, err)
	reported()
}

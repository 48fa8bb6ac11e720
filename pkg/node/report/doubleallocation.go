package report

import (
	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// ReportDoubleAllocation writes a double allocation to the object, once: it isn't
// written again after somebody has removed it or deleted the object. It returns false
// if it should be reported again, because it isn't written yet, the object isn't known or
// has another one that the controller hasn't judged yet. One that is confirmed stays if it
// has the same consequences.
func (r *Reporter) ReportDoubleAllocation(d v1alpha1.DoubleAllocation) (done bool) {
	d.RefusedAt = d.RefusedAt.Rfc3339Copy() // as precise as the API is
	r.mu.Change(func() {
		if done = r.written[claimsOf(&d)]; done {
			delete(r.written, claimsOf(&d))
			return
		}
		if r.inventory == nil || r.doubleAllocation != nil {
			return
		}
		have := r.inventory.Status.DoubleAllocation
		if replaces(&d, have) {
			r.doubleAllocation = &d
			return
		}
		done = have.Confirmed || have.Refused.UID == d.Refused.UID && have.Holder.UID == d.Holder.UID
	})
	return done
}

// replaces reports whether a double allocation is to be written over the one that the
// object has: that one is judged, and says less.
func replaces(d, have *v1alpha1.DoubleAllocation) bool {
	if have == nil {
		return true
	}
	return have.Confirmed && (have.Kubernetes != d.Kubernetes || inventory.AnyAllowsMultipleAllocations(have) && !inventory.AnyAllowsMultipleAllocations(d))
}

// wroteDoubleAllocation forgets the one that was to be written, once it is.
func (r *Reporter) wroteDoubleAllocation(d *v1alpha1.DoubleAllocation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d != nil && d == r.doubleAllocation {
		r.doubleAllocation = nil
		r.written[claimsOf(d)] = true
	}
}

// claims are the UIDs of the two claims of a double allocation.
type claims struct{ refused, holder string }

func claimsOf(d *v1alpha1.DoubleAllocation) claims {
	return claims{refused: d.Refused.UID, holder: d.Holder.UID}
}

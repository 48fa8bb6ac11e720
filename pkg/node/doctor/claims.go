package doctor

import (
	"fmt"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// checkJournal reports files that aren't records.
func (l *look) checkJournal() {
	for _, u := range l.journal.Unreadable {
		l.add(Finding{
			Level: Trouble, Check: "claim-record-unreadable", Claim: claimName(u.Record), Path: u.File,
			What: fmt.Sprintf("the journal file of the claim can't be read (%v); what it recorded may still be in effect", u.Err),
			Do:   "delete the claim's pods: the kubelet then unprepares the claim, which resolves this; if the claim no longer exists, drain the node, remove the file and restart the plugin's pod",
		})
	}
	for _, path := range l.journal.Temporary {
		l.add(temporary(path))
	}
}

func temporary(path string) Finding {
	return Finding{
		Level: Trouble, Check: "temporary-file", Path: path, What: "a temporary file of an interrupted write",
		Do: "restart the plugin's pod on this node: it removes such files",
	}
}

// checkGivenUp reports claims that the kubelet has unprepared and whose containers may
// still run.
func (l *look) checkGivenUp() {
	for _, r := range l.journal.Claims {
		if r.GivenUp == nil {
			continue
		}
		for _, g := range r.Holdings {
			l.add(Finding{
				Level: Note, Check: "claim-given-up", GPU: g.GPU, Claim: claimName(r), Device: string(g.Device),
				What: "the claim was unprepared while its GPUs were lost and its containers still ran; no other claim gets the device before these have ended or the driver was loaded again",
				Do:   "end the processes that the claim's event DevicesStillInUse names; if they hang in the driver, reboot the node",
			})
		}
	}
}

// checkHolders reports devices that two claims hold.
func (l *look) checkHolders() {
	type hold struct {
		record  holding.Record
		holding holding.Holding
	}
	var all []hold
	for _, r := range l.journal.Claims {
		for _, g := range r.Holdings {
			if g.Admin {
				continue
			}
			for _, other := range all {
				if gpu.Conflict(other.holding.Of(), g.Of()) {
					l.add(Finding{
						Level: Trouble, Check: "two-holders", GPU: g.GPU, Claim: claimName(r), Device: string(g.Device),
						What: fmt.Sprintf("claim %s holds %s, which conflicts with %s of claim %s", claimName(r), g.Device, other.holding.Device, claimName(other.record)),
						Do:   "delete the pods of one of the claims, and report this: it must never happen",
					})
				}
			}
			all = append(all, hold{r, g})
		}
	}
}

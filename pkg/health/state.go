package health

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// State has the open causes of one GPU, in the order in which they began, the last
// endings by hand, the attempts to reset it in the last day, and which causes come and
// go. It is a value: its methods return another one and change nothing. The zero State is
// that of a healthy GPU.
//
// A node stores its JSON form. Fields, sources and types of a newer version are kept.
type State struct {
	Causes []Cause  `json:"causes,omitempty"`
	Ended  []Ending `json:"ended,omitempty"`
	Resets []Reset  `json:"resets,omitempty"`
	Flaps  []Flap   `json:"flaps,omitempty"`

	extra map[string]json.RawMessage
}

const (
	// minAbsence is the least time between the first reading without a cause and the one
	// that ends it, so that readings at a burst of events don't count as two.
	minAbsence = time.Second
	// daemonFailsAfter is how long clients of an MPS daemon fail or wait before that is a
	// cause: a daemon that ended once is started again within a second.
	daemonFailsAfter = 10 * time.Second
	// maxEnded is how many endings by hand are kept.
	maxEnded = 8
)

// Reading is the result of reading the GPU once.
type Reading struct {
	At   time.Time
	Load Load
	// Vitals is nil if the GPU didn't answer.
	Vitals *gpu.Vitals
	// Conditions that the reading of the GPU itself has led to: Lost, NotResponding,
	// Unreadable.
	Conditions []gpu.Condition
	// DaemonFaults are those of the GPU's MPS daemons; DaemonsKnown says whether the
	// supervisor reports them.
	DaemonFaults []DaemonFault
	DaemonsKnown bool
}

// DaemonFault says that clients of an MPS daemon fail or wait.
type DaemonFault struct {
	// Since is when that began. Restarts in between don't end it.
	Since   time.Time
	Message string
}

// Notice is a message for the program that was hit by an XID.
type Notice struct {
	XID gpu.XID
	// Message is complete: "XID 31: GPU memory page fault, the program must restart".
	Message string
}

// Observe returns the state after a reading. A cause ends when two readings in a row,
// a second or more apart, agree that it is over. One that comes back within ten minutes
// ends later each time: after two seconds, four, and so on up to four minutes, in which
// no reading reports it. Provisional causes end with the driver's first answer, which is
// definite.
func (s State) Observe(r Reading) State {
	found := r.findings()
	s.Resets = s.resetsSince(r.At)
	causes := slices.Clone(s.Causes)
	switch {
	case r.namesNoRecovery():
		causes = makeDefinite(causes)
	case r.Vitals != nil && r.Vitals.Recovery != gpu.RecoveryNotRead:
		causes = slices.DeleteFunc(causes, Cause.isProvisional)
	}
	for i, c := range causes {
		if c.Load == (Load{}) {
			causes[i].Load = r.Load
		}
		if !slices.ContainsFunc(found, func(f finding) bool { return f.isOf(c) }) {
			causes[i] = causes[i].unreported(r).withPause(r.At)
		}
	}
	s.Causes = causes
	s = s.removeEnded(r.At)
	for _, f := range found {
		s.Causes = add(s.Causes, f, r.At, r.Load)
	}
	return s
}

// ObserveXID returns the state after an XID, and the notice for the program that was hit;
// nil if the XID is of no interest to programs. recovery is the driver's recovery
// action, read after the XID came. If it could not be read, the cause is provisional.
func (s State) ObserveXID(x gpu.XID, recovery gpu.RecoveryAction, load Load) (State, *Notice) {
	e := Lookup(x.Code)
	if e.Resolution == readRecoveryAction {
		return s, nil
	}
	about := e.Condition != "" // about the GPU, not a program
	f, ok := fromRecovery(recovery)
	switch {
	case recovery == gpu.RecoveryUnsupported || recovery == gpu.RecoveryOther:
		f = finding{t: e.Condition, source: FromXID, clause: e.Advice, xid: x.Code}
		ok = about
	case recovery == gpu.RecoveryNotRead:
		f = finding{t: provisionalType(e.Condition), source: FromXID, clause: e.Advice, xid: x.Code, catalogType: e.Condition}
		ok = about
	case about:
		f.xid = x.Code
	}
	if ok {
		s.Causes = add(slices.Clone(s.Causes), f, x.At, load)
	}
	if e.Resolution == ignore && !e.InProgram() {
		return s, nil
	}
	return s, &Notice{XID: x, Message: e.Name() + ", " + advice(e, recovery)}
}

// add adds the finding to the causes, or notes that it is reported again.
func add(causes []Cause, f finding, at time.Time, load Load) []Cause {
	i := slices.IndexFunc(causes, f.isOf)
	if i < 0 {
		return append(causes, f.begin(at, load))
	}
	causes[i] = f.renew(causes[i], at, load)
	return causes
}

// End returns the state after an admin ended the causes of e's type that had begun by a
// time, of which fractions of a second don't count, and records e for each. A cause that its
// source still reports stays accepted until that changes. One that its source doesn't report
// any more ends for good. A GPU that doesn't answer can't be made to: that is an error, and
// so is a type without such a cause. XID and Since of e are ignored.
func (s State) End(e Ending, begunBy time.Time) (State, error) {
	var causes []Cause
	ended := slices.Clone(s.Ended)
	later := ""
	for _, c := range s.Causes {
		isLater := c.Since.Truncate(time.Second).After(begunBy)
		if c.Type != e.Type || !c.Open() || isLater {
			causes = append(causes, c)
			if c.Type == e.Type && c.Open() {
				later = fmt.Sprintf(": it began at %s, which is later than %s", c.Since.UTC().Format(time.RFC3339), begunBy.UTC().Format(time.RFC3339))
			}
			continue
		}
		if c.Source == FromReading && c.goneAt.IsZero() {
			return s, fmt.Errorf("end %s by hand: the GPU doesn't answer; the condition ends when it does", e.Type)
		}
		e.XID, e.Since = c.XID, c.Since
		ended = append(ended, e)
		s.Flaps = slices.DeleteFunc(slices.Clone(s.Flaps), func(f Flap) bool { return f.isOf(c) })
		if c.mayRecur() && c.goneAt.IsZero() {
			c.Accepted = new(e)
			causes = append(causes, c)
		}
	}
	if len(ended) == len(s.Ended) {
		return s, fmt.Errorf("end %s by hand: the GPU has no such condition that can be ended%s", e.Type, later)
	}
	s.Causes, s.Ended = causes, ended[max(0, len(ended)-maxEnded):]
	return s, nil
}

// EndUnlisted is End for the condition Lost of a GPU that NVML doesn't list any more, and so
// won't answer: it has been unbound from the driver, or removed.
func (s State) EndUnlisted(e Ending, begunBy time.Time) (State, error) {
	gone := s
	gone.Causes = slices.Clone(s.Causes)
	for i, c := range gone.Causes {
		if c.isOf(gpu.Lost, FromReading) && c.goneAt.IsZero() {
			gone.Causes[i].goneAt = e.At
		}
	}
	after, err := gone.End(e, begunBy)
	if err != nil {
		return s, err
	}
	return after, nil
}

// Conditions returns the GPU's conditions, the worst first and each type once, with
// the message of the cause that began first.
func (s State) Conditions() []gpu.Condition {
	var all []gpu.Condition
	for _, c := range s.Causes {
		if c.Open() && !slices.ContainsFunc(all, func(have gpu.Condition) bool { return have.Type == c.Type }) {
			all = append(all, gpu.Condition{Type: c.Type, Message: c.Message, Refused: c.Refused, RetryAt: c.RetryAt})
		}
	}
	slices.SortFunc(all, func(a, b gpu.Condition) int {
		return cmp.Or(cmp.Compare(rank(a.Type), rank(b.Type)), cmp.Compare(a.Type, b.Type))
	})
	return all
}

// rank orders types of conditions, the worst first.
func rank(t gpu.ConditionType) int {
	order := []gpu.ConditionType{
		gpu.Lost, gpu.NotResponding, gpu.Unreadable, gpu.RebootRequired, gpu.BusResetRequired, gpu.ResetRequired,
		gpu.PeersMustDrain, gpu.RowRemapFailed, gpu.MPSDaemonFailed, gpu.PrepareFailed, gpu.IMEXRecoveryRequired, gpu.RowRemapPending, gpu.NVLinkDown, gpu.NeedsInspection,
	}
	if i := slices.Index(order, t); i >= 0 {
		return i
	}
	return len(order)
}

// Changes returns the causes that are open in after and not in before, and those that
// were open in before and aren't in after.
func Changes(before, after State) (began, ended []Cause) {
	return missing(before, after), missing(after, before)
}

// missing returns the open causes of s that aren't open in from.
func missing(from, s State) []Cause {
	var out []Cause
	for _, c := range s.Causes {
		in := slices.ContainsFunc(from.Causes, func(d Cause) bool { return d.Open() && d.isOf(c.Type, c.Source) })
		if c.Open() && !in {
			out = append(out, c)
		}
	}
	return out
}

// Equal reports whether the two states are stored alike.
func (s State) Equal(t State) bool {
	a, errA := json.Marshal(s)
	b, errB := json.Marshal(t)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

package health

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Load identifies a load of the driver. An empty field isn't known, and differs from
// nothing.
type Load struct {
	// Boot is the ID of the kernel's boot.
	Boot string `json:"boot,omitempty"`
	// Driver differs each time that the NVIDIA kernel module is loaded.
	Driver string `json:"driver,omitempty"`
}

// Since reports whether the driver was loaded again, or the machine booted, after
// the load before.
func (l Load) Since(before Load) bool {
	differ := func(a, b string) bool { return a != "" && b != "" && a != b }
	return differ(l.Boot, before.Boot) || differ(l.Driver, before.Driver)
}

// Source is where a cause comes from. It decides how the cause ends.
type Source string

const (
	// FromRecoveryAction: the driver asks for a recovery (NVML field 230).
	FromRecoveryAction Source = "RecoveryAction"
	// FromXID: an XID on a driver that names no recovery action.
	FromXID Source = "XID"
	// FromReading: the GPU doesn't answer.
	FromReading Source = "Reading"
	// FromRowRemap: the state of the row remapper.
	FromRowRemap Source = "RowRemap"
	// FromSRAM: the count of uncorrectable errors in SRAM.
	FromSRAM Source = "SRAM"
	// FromNVLink: the state of the NVLinks.
	FromNVLink Source = "NVLink"
	// FromMPSDaemon: the MPS supervisor's reports of the GPU's daemons.
	FromMPSDaemon Source = "MPSDaemon"
	// FromPrepare: a claim could not be given its device.
	FromPrepare Source = "Prepare"
	// FromRecord: the stored State could not be read. The driver doesn't report it.
	FromRecord Source = "Record"
)

// Cause is one thing that is wrong with a GPU, as far as one source says.
type Cause struct {
	Type   gpu.ConditionType `json:"type"`
	Source Source            `json:"source"`
	// Message doesn't change with time or counters.
	Message string `json:"message"`
	// XID that led to the cause; 0 if none did.
	XID uint64 `json:"xid,omitempty"`
	// Links that were down since the cause began.
	Links []int `json:"links,omitempty"`
	// Refused are the devices that claims could not be given, the one to be tried again first.
	// RetryAt is the end of the pause, before which no claim is to try it. Tries counts the
	// tries in vain, and before the first one how often the cause has come back: the length of
	// the next pause follows from it.
	Refused []gpu.DeviceName `json:"refused,omitempty"`
	Tries   int              `json:"tries,omitempty"`
	RetryAt time.Time        `json:"retryAt,omitzero"`
	// CatalogType is set while the cause is provisional: the catalog of XIDs decided, because
	// the GPU had not answered. Type is then none for which a policy may end pods.
	CatalogType gpu.ConditionType `json:"catalogType,omitempty"`
	// Since is when it began.
	Since time.Time `json:"since"`
	// Load is the last load of the driver under which the source reported it.
	Load Load `json:"load"`
	// Accepted is set if an admin ended the cause while its source still reports it.
	// It is then no condition, until the source stops and starts again, the driver is
	// loaded again, or another XID asks for the same.
	Accepted *Ending `json:"accepted,omitempty"`

	// goneAt is when the source first didn't report it any more; zero while it does.
	// It isn't stored: the readings that end a cause follow each other in one process.
	goneAt time.Time
	extra  map[string]json.RawMessage
}

// Open reports whether the cause is a condition of the GPU.
func (c Cause) Open() bool { return c.Accepted == nil }

// isOf reports whether the cause is the one of a type and a source.
func (c Cause) isOf(t gpu.ConditionType, source Source) bool {
	return c.Type == t && c.Source == source
}

func (c Cause) isProvisional() bool { return c.CatalogType != "" }

// Ending records that an admin ended a cause.
type Ending struct {
	Type  gpu.ConditionType `json:"type"`
	XID   uint64            `json:"xid,omitempty"`
	Since time.Time         `json:"since"`
	At    time.Time         `json:"at"`
	By    string            `json:"by"`
	Why   string            `json:"why"`

	extra map[string]json.RawMessage
}

// finding is the report of one source at one time.
type finding struct {
	t      gpu.ConditionType
	source Source
	// clause of the message, without the XID and the links.
	clause string
	xid    uint64
	links  []int
	// catalogType is that of the Cause.
	catalogType gpu.ConditionType
}

func (f finding) isOf(c Cause) bool {
	return c.isOf(f.t, f.source) && c.CatalogType == f.catalogType
}

// begin returns the cause that begins with the finding.
func (f finding) begin(at time.Time, load Load) Cause {
	return Cause{
		Type: f.t, Source: f.source, Message: f.message(), XID: f.xid, Links: f.links, CatalogType: f.catalogType, Since: at, Load: load,
	}
}

// provisionalType returns the type of a provisional cause where the catalog has t.
func provisionalType(t gpu.ConditionType) gpu.ConditionType {
	if t == gpu.RebootRequired {
		return gpu.ResetRequired // a reboot resets the GPU too
	}
	return t
}

// makeDefinite makes provisional causes definite, because the driver names no recovery
// action.
func makeDefinite(causes []Cause) []Cause {
	var out []Cause
	for _, c := range causes {
		if c.isProvisional() {
			c.Type, c.CatalogType = c.CatalogType, ""
		}
		if !slices.ContainsFunc(out, func(d Cause) bool { return d.isOf(c.Type, c.Source) }) {
			out = append(out, c)
		}
	}
	return out
}

// renew returns the cause c, which the finding is of, after its source has reported it
// again.
func (f finding) renew(c Cause, at time.Time, load Load) Cause {
	if c.Accepted != nil && (load.Since(c.Load) || f.xid != 0) {
		c.Accepted, c.XID, c.Links, c.Since = nil, 0, nil, at
	}
	c.goneAt, c.Load = time.Time{}, load
	if f.source == FromXID || f.source == FromReading || f.source == FromMPSDaemon {
		return c // the first XID, and the first error of NVML or of a daemon, explain most
	}
	c.XID = cmp.Or(c.XID, f.xid)
	c.Links = union(c.Links, f.links)
	f.xid, f.links = c.XID, c.Links
	c.Message = f.message()
	return c
}

func (f finding) message() string {
	clause := f.clause
	if len(f.links) > 0 {
		clause += strings.Trim(fmt.Sprint(f.links), "[]")
	}
	switch {
	case f.xid == 0:
		return clause
	case f.source == FromXID:
		return Lookup(f.xid).Name() + ", " + clause
	default:
		return clause + " after " + Lookup(f.xid).Name()
	}
}

func union(a, b []int) []int {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}

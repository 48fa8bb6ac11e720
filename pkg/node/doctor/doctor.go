package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Node has the places where a node's state is to be read, and the parts that were read.
type Node struct {
	// Journal and CDI are directories, as this process sees them.
	Journal, CDI string
	// Host is the node's file system, in which paths of CDI specs are looked up.
	Host driverroot.Host
	// NoHookDir is why no directory will do for the hook program, nil if one does.
	NoHookDir error
	// BootID of the running kernel.
	BootID string
	// Hardware is nil if it can't be read; then NoHardware is the reason. If both
	// are nil, all checks that need a driver are skipped.
	Hardware   *Hardware
	NoHardware error
	// Capabilities is the directory of the driver's MIG capabilities on the host,
	// such as /proc/driver/nvidia/capabilities.
	Capabilities string
	// Sharing is nil if nothing is shared.
	Sharing *Sharing
	// Kubernetes is the version of the API server; empty if unknown.
	Kubernetes string
}

// Hardware is the state of a node's GPUs, as it was read.
type Hardware struct {
	// GPUs are in the order of their indexes.
	GPUs []gpu.GPU
	// MIG has the current mode and all GPU instances of those that have MIG, or NoMIG the
	// error.
	MIG   map[gpu.UUID]gpu.MIG
	NoMIG map[gpu.UUID]error
	// ComputeModes and TimeSlices of those that have some.
	ComputeModes map[gpu.UUID]nvml.ComputeMode
	TimeSlices   map[gpu.UUID]string
}

// Sharing is the state of a node's MPS daemons, as it was read.
type Sharing struct {
	// Daemons are those of the MPS supervisor, or Away says why it doesn't answer.
	Daemons []mps.State
	Away    error
	// Remains are the names of the daemons for which the supervisor has a directory in Dir.
	Dir     string
	Remains []string
}

// Options control how thoroughly Examine checks.
type Options struct {
	// Strict counts leftovers of this driver as trouble.
	Strict bool
	// Looks is the maximum number of checks, Pause the time between two.
	Looks int
	Pause time.Duration
}

// Examine reads and checks the node until a check finds no trouble, or o.Looks times. An
// object that was without trouble in one of the checks was being prepared or
// unprepared; the report has only trouble that every check found, in its latest
// form. The error means that the node couldn't be checked.
//
// In each check, read fills in n's Hardware and Sharing, after the journal was read: a setting
// that is put back in between is found to differ from its record, which the next check
// doesn't find. The other way round it would look as if somebody else had made it.
func Examine(ctx context.Context, o Options, n Node, read func(n *Node) error) (Report, error) {
	bad := func(f Finding) bool { return f.Level == Trouble || o.Strict && f.Level == Leftover }
	var before []Finding // trouble that all checks have found until now
	for looks := 1; ; looks++ {
		l, err := readFiles(n)
		if err == nil {
			err = read(&l.Node)
		}
		if err != nil {
			return Report{}, err
		}
		r := l.check()
		r.Looks = looks
		if looks > 1 {
			r.Findings = slices.DeleteFunc(r.Findings, func(f Finding) bool { return bad(f) && !slices.ContainsFunc(before, f.sameSubject) })
		}
		before = slices.DeleteFunc(slices.Clone(r.Findings), func(f Finding) bool { return !bad(f) })
		r.Healthy = !slices.ContainsFunc(r.Findings, bad)
		if r.Healthy || looks >= o.Looks {
			return r, nil
		}
		select {
		case <-time.After(o.Pause):
		case <-ctx.Done():
			return Report{}, ctx.Err()
		}
	}
}

// Check checks the node once. The findings include the unfinished state of a
// prepare or an unprepare in progress.
func Check(n Node) (Report, error) {
	l, err := readFiles(n)
	if err != nil {
		return Report{}, err
	}
	return l.check(), nil
}

// check checks what was read.
func (l *look) check() Report {
	l.takeHardware()
	l.checkJournal()
	l.checkGivenUp()
	l.checkHolders()
	l.checkSpecs()
	l.checkHookDir()
	l.checkHardware()
	l.checkSharing()
	l.checkServer()
	slices.SortFunc(l.findings, order)
	r := Report{Claims: len(l.journal.Claims), GPUs: len(l.gpus), Findings: slices.Compact(l.findings)}
	for _, g := range l.journal.GPUs {
		r.Instances += len(g.Partitions)
	}
	r.Daemons = l.daemons
	if r.Findings == nil {
		r.Findings = []Finding{}
	}
	r.Healthy = !r.has(Trouble)
	return r
}

// look is one check of a node.
type look struct {
	Node
	journal  journal.Contents
	specs    map[string]specDevice // CDI devices of claims, by name
	common   bool                  // the common CDI spec exists
	gpus     []gpu.GPU
	migs     map[gpu.UUID]gpu.MIG // of the GPUs that have MIG
	names    *gpu.Names           // nil if no GPU answers
	daemons  int                  // number of MPS daemons
	findings []Finding
}

func (l *look) add(f Finding) { l.findings = append(l.findings, f) }

// readFiles begins a check of n: it reads the journal and the CDI directory.
func readFiles(n Node) (*look, error) {
	l := &look{Node: n, specs: map[string]specDevice{}, migs: map[gpu.UUID]gpu.MIG{}}
	var err error
	if l.journal, err = journal.Read(l.Journal); err != nil {
		return nil, err
	}
	return l, l.readSpecs()
}

// takeHardware takes the GPUs that answer.
func (l *look) takeHardware() {
	if l.Hardware == nil {
		return
	}
	for _, g := range l.Hardware.GPUs {
		if !g.Answered() {
			continue
		}
		l.gpus = append(l.gpus, g)
		if m, ok := l.Hardware.MIG[g.UUID]; ok {
			l.migs[g.UUID] = m
		} else if err := l.Hardware.NoMIG[g.UUID]; err != nil {
			l.add(Finding{
				Level: Trouble, Check: "mig-unreadable", GPU: g.UUID, What: fmt.Sprintf("the GPU's MIG instances can't be read: %v", err),
				Do: "run `nvidia-smi mig -lgi` on the node; reset the GPU or reboot the node if that doesn't answer either",
			})
		}
	}
	l.names = gpu.NameAll(l.gpus)
}

// stat looks at a file of the host: it doesn't open any, because a device node that is
// opened does something.
func (l *look) stat(path string) (info fs.FileInfo, err error) {
	err = l.Host.Do(func() error {
		info, err = os.Stat(path)
		return err
	})
	return info, err
}

// holds reports whether a container of the claim may be running: not if the
// claim was prepared in another boot.
func (l *look) holds(r holding.Record) bool { return r.BootID == l.BootID }

// claimName returns the claim's name for users.
func claimName(r holding.Record) string {
	if r.Name == "" {
		return r.ClaimUID
	}
	return r.Namespace + "/" + r.Name
}

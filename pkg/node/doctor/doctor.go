package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// Hardware reads the GPUs of the node.
type Hardware interface {
	// GPUs returns the GPUs that answer, in the order of their indexes.
	GPUs() ([]gpu.GPU, error)
	// MIG returns the current mode of a GPU and all its GPU instances.
	MIG(uuid gpu.UUID) (gpu.MIG, error)
}

// Host is the node's root file system.
type Host interface {
	fs.FS
	// NoExec reports whether it is mounted so that no program can be started in a directory.
	NoExec(dir string) (bool, error)
}

// Node gives access to a node's state.
type Node struct {
	// Journal and CDI are directories, as this process sees them.
	Journal, CDI string
	// Host is the node's root file system, in which paths of CDI specs are looked
	// up.
	Host Host
	// NoHookDir is why no directory will do for the hook program, nil if one does.
	NoHookDir error
	// BootID of the running kernel.
	BootID string
	// Hardware is nil if it can't be read; then NoHardware is the reason. If both
	// are nil, all checks that need a driver are skipped.
	Hardware   Hardware
	NoHardware error
	// Capabilities is the directory of the driver's MIG capabilities on the host,
	// such as /proc/driver/nvidia/capabilities.
	Capabilities string
	// Sharing is nil if nothing is shared; MPSDir has a directory for each MPS
	// daemon.
	Sharing Sharing
	MPSDir  string
	// Kubernetes is the version of the API server; empty if unknown.
	Kubernetes string
}

// Options control how thoroughly Examine checks.
type Options struct {
	// Strict counts leftovers of this driver as trouble.
	Strict bool
	// Looks is the maximum number of checks, Pause the time between two.
	Looks int
	Pause time.Duration
}

// Examine checks the node until a check finds no trouble, or o.Looks times. An
// object that was without trouble in one of the checks was being prepared or
// unprepared; the report has only trouble that every check found, in its latest
// form. The error means that the node couldn't be checked.
func Examine(ctx context.Context, n Node, o Options) (Report, error) {
	bad := func(f Finding) bool { return f.Level == Trouble || o.Strict && f.Level == Leftover }
	var before []Finding // trouble that all checks have found until now
	for looks := 1; ; looks++ {
		r, err := Check(n)
		if err != nil {
			return Report{}, err
		}
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
	l := look{Node: n, specs: map[string]specDevice{}, migs: map[gpu.UUID]gpu.MIG{}}
	if err := l.read(); err != nil {
		return Report{}, err
	}
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
	return r, nil
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

// read reads everything. It reads the journal first: a record is written before
// its effects and removed after them, so this order gives the fewest false
// findings about claims that change in the meantime.
func (l *look) read() error {
	var err error
	if l.journal, err = journal.Read(l.Journal); err != nil {
		return err
	}
	if err := l.readSpecs(); err != nil {
		return err
	}
	return l.readHardware()
}

func (l *look) readHardware() error {
	if l.Hardware == nil {
		return nil
	}
	all, err := l.Hardware.GPUs()
	if err != nil {
		return fmt.Errorf("read the GPUs: %w", err)
	}
	for _, g := range all {
		if !g.Answered() {
			continue
		}
		l.gpus = append(l.gpus, g)
		if g.MIG == nil {
			continue
		}
		m, err := l.Hardware.MIG(g.UUID)
		if err != nil {
			l.add(Finding{
				Level: Trouble, Check: "mig-unreadable", GPU: g.UUID, What: fmt.Sprintf("the GPU's MIG instances can't be read: %v", err),
				Do: "run `nvidia-smi mig -lgi` on the node; reset the GPU or reboot the node if that doesn't answer either",
			})
			continue
		}
		l.migs[g.UUID] = m
	}
	l.names = gpu.NameAll(l.gpus)
	return nil
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

package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// Hardware answers for the GPUs of the node.
type Hardware interface {
	// GPUs that answer, in the order of their indexes.
	GPUs() ([]gpu.GPU, error)
	// MIG is the mode of a GPU and all its GPU instances, as they are now.
	MIG(uuid gpu.UUID) (gpu.MIG, error)
}

// Node is where a node's state is.
type Node struct {
	// Journal and CDI are directories, as this process sees them.
	Journal, CDI string
	// Host is the node's file system from its root: paths in CDI specs are there.
	Host fs.FS
	// BootID of the running kernel.
	BootID string
	// Hardware is nil where it can't be looked at, NoHardware then says why. With
	// neither, nothing that has to do with a driver is looked at.
	Hardware   Hardware
	NoHardware error
	// Capabilities is the directory of the driver's MIG capabilities on the host,
	// such as /proc/driver/nvidia/capabilities.
	Capabilities string
	// Sharing is nil where nothing is shared; MPSDir is the directory with one for
	// each MPS daemon.
	Sharing Sharing
	MPSDir  string
	// Kubernetes is the version of the API server; empty where it isn't known.
	Kubernetes string
}

// Options say how sure Examine makes itself.
type Options struct {
	// Strict: what this driver has left over is trouble too.
	Strict bool
	// Looks is how often Examine looks at most, Pause how long it waits between.
	Looks int
	Pause time.Duration
}

// Examine looks at the node until a look finds no trouble, or o.Looks times.
// What had no trouble in one of them was in the hands of a prepare or an
// unprepare; only what has some each time is told of, as it is at last. The
// error says why it couldn't look.
func Examine(ctx context.Context, n Node, o Options) (Report, error) {
	bad := func(f Finding) bool { return f.Level == Trouble || o.Strict && f.Level == Leftover }
	var before []Finding // about what was bad in every look until now
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

// Check looks at the node once. Where a prepare or an unprepare is under way
// what it has done by half is among the findings.
func Check(n Node) (Report, error) {
	l := look{Node: n, specs: map[string]specDevice{}, migs: map[gpu.UUID]gpu.MIG{}}
	if err := l.read(); err != nil {
		return Report{}, err
	}
	l.checkJournal()
	l.checkHolders()
	l.checkSpecs()
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

// look is one look at a node.
type look struct {
	Node
	journal  journal.Contents
	specs    map[string]specDevice // CDI devices of claims, by name
	common   bool                  // the common CDI spec is there
	gpus     []gpu.GPU
	migs     map[gpu.UUID]gpu.MIG // of the GPUs that have MIG
	names    *gpu.Names           // nil where no GPU answers
	daemons  int                  // of MPS
	findings []Finding
}

func (l *look) add(f Finding) { l.findings = append(l.findings, f) }

// read reads everything. The journal is read first: a record is there before
// what it is about and goes after it, so that a claim that comes meanwhile
// isn't missed by halves more often than it must be.
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
		if len(g.Conditions) > 0 {
			continue // known, but it doesn't answer
		}
		l.gpus = append(l.gpus, g)
		if g.MIG == nil {
			continue
		}
		m, err := l.Hardware.MIG(g.UUID)
		if err != nil {
			l.add(Finding{
				Level: Trouble, Check: "mig-unreadable", GPU: g.UUID, What: fmt.Sprintf("the GPU's MIG instances can't be read: %v", err),
				Do: "see what `nvidia-smi mig -lgi` says on the node; reset the GPU or reboot the node if it doesn't answer either",
			})
			continue
		}
		l.migs[g.UUID] = m
	}
	if len(l.gpus) > 0 {
		l.names, err = gpu.NewNames(l.gpus)
	}
	return err
}

// holds says whether a container of the claim may be running now: none can that
// was prepared in another boot.
func (l *look) holds(r journal.Record) bool { return r.BootID == l.BootID }

// claimName is what people know the claim by.
func claimName(r journal.Record) string {
	if r.Name == "" {
		return r.ClaimUID
	}
	return r.Namespace + "/" + r.Name
}

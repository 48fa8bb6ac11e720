package containers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/files"
)

// MountDir is the directory in containers below which the marks are mounted.
// Every container has a /dev of its own, which is writable while its mounts are
// made.
const MountDir = "/dev/tessera"

// scanEvery is the interval of scans of the host's processes while a deleted
// mark can't be watched.
const scanEvery = time.Second

// uidPattern matches claim UIDs that are allowed as file names.
var uidPattern = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z_.-]{0,127}$`)

// Containers keeps the marks of one node's claims. Its methods may be called
// concurrently, for one claim by one caller at a time.
type Containers struct {
	dir     string
	host    driverroot.Host
	events  *events
	cgroups *cgroups

	// deleted has the *deleted of claims, by UID.
	deleted sync.Map
}

// deleted has a claim's deleted marks that may still be mounted. Who waits for the claim's
// containers uses it.
type deleted struct {
	watches []*watch
	// unwatched: there may be some without a watch.
	unwatched bool
}

// New returns the Containers whose marks are in dir, which has the same path here
// and on the host.
func New(dir string, host driverroot.Host) (*Containers, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create the directory of the claims' marks: %w", err)
	}
	return &Containers{
		dir: dir, host: host, events: newEvents(), cgroups: &cgroups{root: host.Path("/sys/fs/cgroup")},
	}, nil
}

// Run reads the kernel's events until ctx ends. Without it AwaitEnd polls.
func (c *Containers) Run(ctx context.Context) error { return c.events.run(ctx) }

// Recover finds containers with marks that were deleted before this process
// started. Call it once at the start, before Mark creates these marks again.
func (c *Containers) Recover() error {
	mounts, err := c.scan()
	for _, m := range mounts {
		if m.deleted {
			c.deletedOf(m.claimUID).unwatched = true
		}
	}
	return err
}

// deletedOf returns the deleted marks of a claim.
func (c *Containers) deletedOf(claimUID string) *deleted {
	d, _ := c.deleted.LoadOrStore(claimUID, &deleted{})
	return d.(*deleted)
}

// Mark creates the claim's mark, if it isn't there, and returns its path on the
// host and in containers.
func (c *Containers) Mark(claimUID string) (hostPath, containerPath string, _ error) {
	if !uidPattern.MatchString(claimUID) {
		return "", "", fmt.Errorf("create the mark of a claim: %q can't be its UID", claimUID)
	}
	path := filepath.Join(c.dir, claimUID)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o444)
	if err != nil {
		return "", "", fmt.Errorf("create the mark of a claim: %w", err)
	}
	return path, filepath.Join(MountDir, claimUID), f.Close()
}

// Marks lists the UIDs of the claims that have a mark.
func (c *Containers) Marks() ([]string, error) {
	entries, err := os.ReadDir(c.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the marks of claims: %w", err)
	}
	var uids []string
	for _, e := range entries {
		uids = append(uids, e.Name())
	}
	return uids, nil
}

// Unmark deletes the claim's mark without waiting for containers, and drops all data
// about the claim's containers.
func (c *Containers) Unmark(claimUID string) error {
	if err := c.unlink(claimUID); err != nil {
		return err
	}
	for _, w := range c.deletedOf(claimUID).watches {
		c.events.remove(w)
	}
	c.deleted.Delete(claimUID)
	return nil
}

func (c *Containers) unlink(claimUID string) error {
	if err := files.RemoveIfThere(filepath.Join(c.dir, claimUID)); err != nil {
		return fmt.Errorf("delete the mark of the claim: %w", err)
	}
	return nil
}

// AwaitEnd deletes the claim's mark, so that no further container can start with the
// claim, and waits until no process is left of the containers that mounted it, nor of
// the pods. If ctx ends first, the error names the remaining pods and processes, and
// those that never became their container's program are killed; a later call continues
// the wait.
func (c *Containers) AwaitEnd(ctx context.Context, claimUID string, pods []kubeletplugin.NamespacedObject) error {
	d := c.deletedOf(claimUID)
	if err := c.delete(claimUID, d); err != nil {
		return err
	}
	err := c.waitMounts(ctx, claimUID, d)
	if err == nil {
		err = c.cgroups.waitEmpty(ctx, c.events, pods)
	}
	if err == nil || ctx.Err() == nil {
		return err
	}
	left := c.describeLeft(claimUID, pods)
	if killed := c.killUnstarted(claimUID); len(killed) > 0 {
		left += fmt.Sprintf("; killed %d, which their runtime had made but never started", killed)
	}
	return fmt.Errorf("%w: %s", context.Cause(ctx), left)
}

// delete unlinks the claim's mark, and watches it if it is still mounted.
func (c *Containers) delete(claimUID string, d *deleted) error {
	w, err := c.events.add(filepath.Join(c.dir, claimUID))
	if err == nil {
		if err := c.unlink(claimUID); err != nil {
			c.events.remove(w)
			return err
		}
		d.watches = append(d.watches, w)
		return nil
	}
	if deletedBefore := errors.Is(err, fs.ErrNotExist) && len(d.watches) > 0; deletedBefore {
		return nil
	}
	// Somebody else has deleted it, or the host allows no more watches.
	d.unwatched = true
	return c.unlink(claimUID)
}

// waitMounts waits until no mount namespace has a mark of the claim.
func (c *Containers) waitMounts(ctx context.Context, claimUID string, d *deleted) error {
	for _, w := range d.watches {
		select {
		case <-w.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		d.unwatched = d.unwatched || w.lost
	}
	d.watches = nil
	for d.unwatched {
		mounted, err := c.IsMounted(claimUID)
		if err != nil {
			return err
		}
		if d.unwatched = mounted; mounted {
			if err := pause(ctx, nil, scanEvery); err != nil {
				return err
			}
		}
	}
	c.deleted.Delete(claimUID)
	return nil
}

// IsMounted reports whether any process sees a mark of the claim: a container with the claim
// runs. It scans the host's processes.
func (c *Containers) IsMounted(claimUID string) (bool, error) {
	mounts, err := c.scan()
	return slices.ContainsFunc(mounts, func(m mount) bool { return m.claimUID == claimUID }), err
}

// pause waits until done, which may be nil, is closed or d has passed. It
// returns ctx's error.
func pause(ctx context.Context, done <-chan struct{}, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

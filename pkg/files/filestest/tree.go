package filestest

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Entry is a file or a directory of a Tree.
type Entry struct {
	Mode fs.FileMode
	Data string
}

// Tree has the files and directories on a disk, by path below its directory.
type Tree map[string]Entry

// ID is the same for equal trees.
func (t Tree) ID() string {
	var b strings.Builder
	for _, path := range slices.Sorted(maps.Keys(t)) {
		fmt.Fprintf(&b, "%q %v %q\n", path, t[path].Mode, t[path].Data)
	}
	return fmt.Sprintf("%x", sha256.Sum256([]byte(b.String())))
}

// load returns the directory in the tree, all of it durable.
func (d *Disk) load(path string, t Tree) *inode {
	dir := d.newInode(path, syscall.S_IFDIR|0o755)
	if path != "." {
		dir.mode = syscall.S_IFDIR | uint32(t[path].Mode.Perm())
	}
	for p, e := range t {
		if filepath.Dir(p) != path {
			continue
		}
		child := d.newInode(p, syscall.S_IFREG|uint32(e.Mode.Perm()))
		if e.Mode.IsDir() {
			child = d.load(p, t)
		}
		child.data, child.synced = []byte(e.Data), []byte(e.Data)
		dir.names[filepath.Base(p)] = child
	}
	return dir
}

// Loss decides how much a power cut leaves of names and data that weren't synced.
type Loss struct {
	name string
	// pick returns which of n values of a name remains; the first is the one that was
	// synced, the last the present one.
	pick func(n int) int
	// data returns the rest of a file's data.
	data func(synced, now []byte) []byte
}

func (l Loss) String() string { return l.name }

func oldest(int) int   { return 0 }
func newest(n int) int { return n - 1 }

func syncedData(synced, _ []byte) []byte { return synced }
func newData(_, now []byte) []byte       { return now }

// zeros has the file's size and none of the new data.
func zeros(synced, now []byte) []byte {
	data := make([]byte, len(now))
	copy(data, synced)
	return data
}

// half has the first half of the new data.
func half(synced, now []byte) []byte {
	if string(synced) == string(now) {
		return now
	}
	return now[:len(now)/2]
}

// Losses are the extremes that POSIX allows; the first three lose most.
func Losses() []Loss {
	return []Loss{
		{"everything", oldest, syncedData},
		{"data", newest, syncedData},
		{"half of the data", newest, half},
		{"data, which are zeros", newest, zeros},
		{"names", oldest, newData},
		{"nothing", newest, newData},
	}
}

// RandomLoss loses some names, and all or some of some files' data.
func RandomLoss(r *rand.Rand) Loss {
	return Loss{"some", r.IntN, func(synced, now []byte) []byte {
		all := []func(synced, now []byte) []byte{syncedData, newData, zeros, half}
		return all[r.IntN(len(all))](synced, now)
	}}
}

// Contents returns what programs see on the disk, synced or not.
func (d *Disk) Contents() Tree { return d.Cut(Loss{"nothing", newest, newData}) }

// Cut returns the contents of the disk after a power cut at this moment.
func (d *Disk) Cut(l Loss) Tree {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cut(l)
}

func (d *Disk) cut(l Loss) Tree {
	t := Tree{}
	d.root.cut(".", l, t)
	return t
}

func (n *inode) cut(path string, l Loss, into Tree) {
	names := map[string]*inode{}
	maps.Copy(names, n.names)
	for _, name := range slices.Sorted(maps.Keys(n.unsynced)) {
		values := n.unsynced[name]
		names[name] = values[l.pick(len(values))]
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		child, at := names[name], filepath.Join(path, name)
		switch {
		case child == nil:
		case child.isDir():
			into[at] = Entry{Mode: fs.ModeDir | fs.FileMode(child.mode).Perm()}
			child.cut(at, l, into)
		default:
			into[at] = Entry{Mode: fs.FileMode(child.mode).Perm(), Data: string(l.data(child.synced, child.data))}
		}
	}
}

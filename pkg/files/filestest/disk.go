package filestest

import (
	"context"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// Op is a system call on a file or directory of the disk. Lookups of names and attributes
// aren't reported, and never fail.
type Op struct {
	// Call is one of open, open for writing, create, read, readdir, write, truncate, chmod,
	// fsync, rename, unlink, mkdir, rmdir.
	Call string
	// Path is below the disk's directory; for a rename, the new one.
	Path string
}

func (o Op) String() string { return o.Call + " " + o.Path }

// Changes reports whether the call changes something, makes it durable, or needs a disk
// that can be changed.
func (o Op) Changes() bool {
	return o.Call != "open" && o.Call != "read" && o.Call != "readdir"
}

// Disk is a disk that is mounted at Dir.
type Disk struct {
	Dir string

	mu       sync.Mutex
	root     *inode
	last     uint64 // number of the newest inode
	fail     func(Op) syscall.Errno
	failLate func(Op) syscall.Errno
	watch    func(Op, func(Loss) Tree)
}

// New mounts a disk at a directory until the test ends. Everything in the tree is on
// it, durably.
func New(t testing.TB, dir string, tree Tree) *Disk {
	t.Helper()
	d := &Disk{Dir: dir}
	d.root = d.load(".", tree)
	server, err := fs.Mount(d.Dir, d.root, &fs.Options{
		MountOptions:    fuse.MountOptions{DirectMountStrict: true, FsName: "filestest", Name: "filestest"},
		NullPermissions: true,
		RootStableAttr:  &fs.StableAttr{Ino: d.root.number},
	})
	if err != nil {
		t.Fatalf("mount the test's disk (needs root and /dev/fuse): %v", err)
	}
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Errorf("unmount the test's disk: %v", err)
		}
	})
	return d
}

// Reset replaces the contents of the disk by the tree, durably. No program may use the disk
// meanwhile.
func (d *Disk) Reset(tree Tree) {
	d.mu.Lock()
	defer d.mu.Unlock()
	root := d.load(".", tree)
	d.root.names, d.root.unsynced = root.names, root.unsynced
}

// Fail has each call return fail's error for it, unless that is 0, and do nothing, but that
// a write writes half of its data. nil ends this. fail must not use the disk.
func (d *Disk) Fail(fail func(Op) syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = fail
}

// FailLate is Fail for calls that have all of their effect, and return an error
// nevertheless.
func (d *Disk) FailLate(fail func(Op) syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failLate = fail
}

// Watch has watch called after each call that succeeded and for which Changes is true; nil
// ends this. cut is Cut at this moment. watch must not use the disk.
func (d *Disk) Watch(watch func(op Op, cut func(Loss) Tree)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watch = watch
}

// do runs one call; path is below the disk's directory.
func (d *Disk) do(call, path string, f func() syscall.Errno) syscall.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	op := Op{call, path}
	if d.fail != nil {
		if errno := d.fail(op); errno != 0 {
			return errno
		}
	}
	if errno := f(); errno != 0 {
		return errno
	}
	if d.watch != nil && op.Changes() {
		d.watch(op, d.cut)
	}
	if d.failLate != nil {
		return d.failLate(op)
	}
	return 0
}

// inode is a file or a directory. The disk's lock guards its contents.
type inode struct {
	fs.Inode
	disk   *Disk
	number uint64
	mode   uint32
	// path is below the disk's directory, also after the file was removed.
	path string

	// A file has data now, and had synced when it was last synced.
	data, synced []byte

	// A directory has names now. unsynced has the names that have changed since it was last
	// synced, with the inodes they have had since, the synced one first; nil is none.
	names    map[string]*inode
	unsynced map[string][]*inode
}

var (
	_ fs.NodeLookuper  = (*inode)(nil)
	_ fs.NodeGetattrer = (*inode)(nil)
	_ fs.NodeSetattrer = (*inode)(nil)
	_ fs.NodeOpener    = (*inode)(nil)
	_ fs.NodeCreater   = (*inode)(nil)
	_ fs.NodeReader    = (*inode)(nil)
	_ fs.NodeWriter    = (*inode)(nil)
	_ fs.NodeFsyncer   = (*inode)(nil)
	_ fs.NodeReaddirer = (*inode)(nil)
	_ fs.NodeMkdirer   = (*inode)(nil)
	_ fs.NodeUnlinker  = (*inode)(nil)
	_ fs.NodeRmdirer   = (*inode)(nil)
	_ fs.NodeRenamer   = (*inode)(nil)
)

func (d *Disk) newInode(path string, mode uint32) *inode {
	d.last++
	n := &inode{disk: d, number: d.last, mode: mode, path: path}
	if mode&syscall.S_IFMT == syscall.S_IFDIR {
		n.names, n.unsynced = map[string]*inode{}, map[string][]*inode{}
	}
	return n
}

// set gives the name in a directory to an inode, or to none.
func (n *inode) set(name string, to *inode) {
	if _, ok := n.unsynced[name]; !ok {
		n.unsynced[name] = []*inode{n.names[name]}
	}
	n.unsynced[name] = append(n.unsynced[name], to)
	if to == nil {
		delete(n.names, name)
		return
	}
	n.names[name], to.path = to, filepath.Join(n.path, name)
}

func (n *inode) isDir() bool { return n.names != nil }

func (n *inode) attr(out *fuse.Attr) {
	out.Ino, out.Mode, out.Nlink, out.Size = n.number, n.mode, 1, uint64(len(n.data))
}

// announce makes an inode below this one known to the kernel.
func (n *inode) announce(ctx context.Context, child *inode) *fs.Inode {
	return n.NewPersistentInode(ctx, child, fs.StableAttr{Mode: child.mode & syscall.S_IFMT, Ino: child.number})
}

// Lookup finds a name.
func (n *inode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.disk.mu.Lock()
	child := n.names[name]
	if child == nil {
		n.disk.mu.Unlock()
		return nil, syscall.ENOENT
	}
	child.attr(&out.Attr)
	n.disk.mu.Unlock()
	return n.announce(ctx, child), 0
}

// Getattr reads an inode's attributes.
func (n *inode) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	n.attr(&out.Attr)
	return 0
}

// Setattr changes the mode or the size; times are ignored.
func (n *inode) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if size, ok := in.GetSize(); ok {
		errno := n.disk.do("truncate", n.path, func() syscall.Errno { n.resize(int(size)); return 0 })
		if errno != 0 {
			return errno
		}
	}
	if mode, ok := in.GetMode(); ok {
		errno := n.disk.do("chmod", n.path, func() syscall.Errno {
			n.mode = n.mode&syscall.S_IFMT | mode&^syscall.S_IFMT
			return 0
		})
		if errno != 0 {
			return errno
		}
	}
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	n.attr(&out.Attr)
	return 0
}

func (n *inode) resize(size int) {
	data := make([]byte, size)
	copy(data, n.data)
	n.data = data
}

// Open opens a file. One that is to be written counts as changed: a disk that is
// mounted read-only refuses it.
func (n *inode) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	call := "open"
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY {
		call = "open for writing"
	}
	return nil, fuse.FOPEN_DIRECT_IO, n.disk.do(call, n.path, func() syscall.Errno {
		if flags&syscall.O_TRUNC != 0 {
			n.data = nil
		}
		return 0
	})
}

// Create makes and opens a file.
func (n *inode) Create(ctx context.Context, name string, _ uint32, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	var child *inode
	errno := n.disk.do("create", filepath.Join(n.path, name), func() syscall.Errno {
		child = n.disk.newInode("", syscall.S_IFREG|mode)
		n.set(name, child)
		child.attr(&out.Attr)
		return 0
	})
	if errno != 0 {
		return nil, nil, 0, errno
	}
	return n.announce(ctx, child), nil, fuse.FOPEN_DIRECT_IO, 0
}

// Read reads from a file.
func (n *inode) Read(_ context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	var read int
	errno := n.disk.do("read", n.path, func() syscall.Errno {
		if off < int64(len(n.data)) {
			read = copy(dest, n.data[off:])
		}
		return 0
	})
	return fuse.ReadResultData(dest[:read]), errno
}

// Write writes to a file.
func (n *inode) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	done := false
	errno := n.disk.do("write", n.path, func() syscall.Errno {
		n.write(data, int(off))
		done = true
		return 0
	})
	if errno != 0 && !done {
		n.disk.mu.Lock()
		defer n.disk.mu.Unlock()
		n.write(data[:len(data)/2], int(off))
	}
	if errno != 0 {
		return 0, errno
	}
	return uint32(len(data)), 0
}

func (n *inode) write(data []byte, off int) {
	if end := off + len(data); end > len(n.data) {
		n.resize(end)
	}
	copy(n.data[off:], data)
}

// Fsync makes a file's data, or a directory's names, durable.
func (n *inode) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	return n.disk.do("fsync", n.path, func() syscall.Errno {
		n.synced = append([]byte(nil), n.data...)
		if n.isDir() {
			clear(n.unsynced)
		}
		return 0
	})
}

// Readdir lists a directory.
func (n *inode) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	var list []fuse.DirEntry
	errno := n.disk.do("readdir", n.path, func() syscall.Errno {
		for name, child := range n.names {
			list = append(list, fuse.DirEntry{Name: name, Ino: child.number, Mode: child.mode})
		}
		return 0
	})
	if errno != 0 {
		return nil, errno
	}
	return fs.NewListDirStream(list), 0
}

// Mkdir makes a directory.
func (n *inode) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	var child *inode
	errno := n.disk.do("mkdir", filepath.Join(n.path, name), func() syscall.Errno {
		child = n.disk.newInode("", syscall.S_IFDIR|mode)
		n.set(name, child)
		child.attr(&out.Attr)
		return 0
	})
	if errno != 0 {
		return nil, errno
	}
	return n.announce(ctx, child), 0
}

// Unlink removes a file's name.
func (n *inode) Unlink(_ context.Context, name string) syscall.Errno { return n.remove("unlink", name) }

// Rmdir removes an empty directory.
func (n *inode) Rmdir(_ context.Context, name string) syscall.Errno { return n.remove("rmdir", name) }

func (n *inode) remove(call, name string) syscall.Errno {
	return n.disk.do(call, filepath.Join(n.path, name), func() syscall.Errno {
		switch child := n.names[name]; {
		case child == nil:
			return syscall.ENOENT
		case len(child.names) > 0:
			return syscall.ENOTEMPTY
		}
		n.set(name, nil)
		return 0
	})
}

// Rename moves a name.
func (n *inode) Rename(_ context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	to, ok := parent.(*inode)
	if !ok || flags != 0 {
		return syscall.EINVAL
	}
	return n.disk.do("rename", filepath.Join(to.path, newName), func() syscall.Errno {
		child := n.names[name]
		if child == nil {
			return syscall.ENOENT
		}
		n.set(name, nil)
		to.set(newName, child)
		return 0
	})
}

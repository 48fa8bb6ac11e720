package nvmlsim

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The state file: a header page and two slots. The lowest bit of the header's
// generation selects the current slot; waiters sleep on the generation (a
// futex). A writer holds a flock, fills the other slot and then increments the
// generation; if it is killed at any point, the current slot is intact. The
// file is allocated at once and never truncated or replaced, so mapped headers
// stay valid, a full disk doesn't affect updates, and the file can be
// bind-mounted.
const (
	storeMagic    = "NVMLSIM1"
	headerSize    = 4096
	slotSize      = 1 << 20
	storeSize     = headerSize + 2*slotSize
	generationOff = 8
	slotHeader    = 16 // length uint64, crc32 uint32, padding
)

// ErrNoState says that there is no state file at a path.
var ErrNoState = errors.New("no simulated machine")

// Store is an open state file. Its methods may be called concurrently by any
// number of goroutines and processes.
type Store struct {
	path     string
	file     *os.File
	header   []byte // mapped, shared
	writable bool
	cache    atomic.Pointer[snapshot]
}

type snapshot struct {
	generation uint64
	state      *State
}

// CreateStore creates the state file at path with this state, or replaces the
// content of an existing file. Processes that have it open see the new content.
func CreateStore(path string, s State) (*Store, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("create state file: %w", err)
	}
	defer f.Close()
	// Every user may change the state, as with the permissions of /dev/nvidia*.
	if err := f.Chmod(0o666); err != nil {
		return nil, fmt.Errorf("create state file: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if err := allocate(f); err != nil {
		return nil, fmt.Errorf("allocate state file %s: %w", path, err)
	}
	header, err := mapHeader(f, true)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	defer func() { _ = unix.Munmap(header) }()
	if err := commit(f, header, &s); err != nil {
		return nil, err
	}
	copy(header, storeMagic)
	return OpenStore(path)
}

func allocate(f *os.File) error {
	err := unix.Fallocate(int(f.Fd()), 0, 0, storeSize)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return f.Truncate(storeSize)
	}
	return err
}

// OpenStore opens the state file at path. Without write permission (or on a
// read-only mount) it can be read but not updated. It returns ErrNoState if there
// is no file.
func OpenStore(path string) (*Store, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	writable := err == nil
	if errors.Is(err, os.ErrPermission) || errors.Is(err, unix.EROFS) {
		f, err = os.Open(path)
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("%w: %s does not exist", ErrNoState, path)
	}
	if err != nil {
		return nil, fmt.Errorf("open state file: %w", err)
	}
	header, err := openHeader(f, writable)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open state file %s: %w", path, err), f.Close())
	}
	s := &Store{path: path, file: f, header: header, writable: writable}
	runtime.AddCleanup(s, func(header []byte) { _ = unix.Munmap(header) }, header)
	return s, nil
}

func openHeader(f *os.File, writable bool) ([]byte, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if fi.Size() < storeSize {
		return nil, errors.New("too short to be one; reinstall")
	}
	header, err := mapHeader(f, writable)
	if err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(header, []byte(storeMagic)) {
		return nil, errors.Join(errors.New("not a state file of this version; reinstall"), unix.Munmap(header))
	}
	return header, nil
}

func mapHeader(f *os.File, writable bool) ([]byte, error) {
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	return unix.Mmap(int(f.Fd()), 0, headerSize, prot, unix.MAP_SHARED)
}

// Close releases the file. Later reads fail; calls in progress on other
// goroutines are safe (the header is unmapped after the last of them).
func (s *Store) Close() error { return s.file.Close() }

// Path returns the path of the file.
func (s *Store) Path() string { return s.path }

func generationOf(header []byte) *uint64 {
	return (*uint64)(unsafe.Pointer(&header[generationOff]))
}

// Generation returns a number that every update increments.
func (s *Store) Generation() uint64 { return atomic.LoadUint64(generationOf(s.header)) }

// Read returns the current state. If nothing has changed since the last call,
// it costs one load from memory.
func (s *Store) Read() (*State, error) {
	for {
		g := s.Generation()
		if c := s.cache.Load(); c != nil && c.generation == g {
			return c.state, nil
		}
		body, err := readSlot(s.file, g)
		// After the next generation a writer may be writing this slot.
		if s.Generation() != g {
			continue
		}
		st, err := decode(body, err)
		if err != nil {
			return nil, fmt.Errorf("read state file %s: %w", s.path, err)
		}
		s.cache.Store(&snapshot{generation: g, state: st})
		return st, nil
	}
}

func slotOffset(generation uint64) int64 { return headerSize + int64(generation&1)*slotSize }

// readSlot returns the checksum in a slot, followed by the encoded state.
func readSlot(f *os.File, generation uint64) ([]byte, error) {
	var h [slotHeader]byte
	off := slotOffset(generation)
	if _, err := f.ReadAt(h[:], off); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(h[:])
	if n > slotSize-slotHeader {
		return nil, fmt.Errorf("length %d", n)
	}
	content := make([]byte, 4+n)
	copy(content, h[8:12])
	if _, err := f.ReadAt(content[4:], off+slotHeader); err != nil {
		return nil, err
	}
	return content, nil
}

// decode decodes the result of readSlot.
func decode(content []byte, err error) (*State, error) {
	if err != nil {
		return nil, err
	}
	body := content[4:]
	if crc32.ChecksumIEEE(body) != binary.LittleEndian.Uint32(content) {
		return nil, errors.New("checksum is wrong")
	}
	st := new(State)
	if err := json.Unmarshal(body, st); err != nil {
		return nil, err
	}
	if st.Version != stateVersion || len(st.GPUs) != len(st.Description.GPUs) {
		return nil, fmt.Errorf("version %d with %d GPUs of %d; reinstall", st.Version, len(st.GPUs), len(st.Description.GPUs))
	}
	return st, nil
}

// commit writes a state into the other slot and makes that slot current. The
// caller holds the lock.
func commit(f *os.File, header []byte, st *State) error {
	body, err := json.Marshal(st)
	if err != nil {
		return fmt.Errorf("encode state: %w", err)
	}
	if len(body) > slotSize-slotHeader {
		return fmt.Errorf("state of %d bytes does not fit the state file", len(body))
	}
	next := atomic.LoadUint64(generationOf(header)) + 1
	b := make([]byte, slotHeader, slotHeader+len(body))
	binary.LittleEndian.PutUint64(b, uint64(len(body)))
	binary.LittleEndian.PutUint32(b[8:], crc32.ChecksumIEEE(body))
	if _, err := f.WriteAt(append(b, body...), slotOffset(next)); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	atomic.StoreUint64(generationOf(header), next)
	futexWake(header)
	return nil
}

// Update changes the state: it calls change with a private copy of the current
// state, under a lock among all processes, and stores the changed copy. If
// change returns an error, Update stores nothing and returns that error. It
// returns NoPermission if the file can't be written.
func (s *Store) Update(change func(*State) error) error {
	if !s.writable {
		return fmt.Errorf("state file %s is read-only here: %w", s.path, NoPermission)
	}
	// A separate open file description makes the lock effective between goroutines
	// too.
	f, err := os.OpenFile(s.path, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("update state: %w", err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", s.path, err)
	}
	st, err := decode(readSlot(f, s.Generation()))
	if err != nil {
		return fmt.Errorf("read state file %s: %w", s.path, err)
	}
	if err := change(st); err != nil {
		return err
	}
	return commit(f, s.header, st)
}

// WaitChange returns when the generation is no longer the given one, or after
// the timeout, whichever is first. It may also return earlier.
func (s *Store) WaitChange(generation uint64, timeout time.Duration) {
	ts := unix.NsecToTimespec(max(timeout, 0).Nanoseconds())
	const futexWait = 0
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&s.header[generationOff])),
		futexWait, uintptr(uint32(generation)), uintptr(unsafe.Pointer(&ts)), 0, 0)
	runtime.KeepAlive(s)
}

func futexWake(header []byte) {
	const futexWakeOp, everybody = 1, 1<<31 - 1
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&header[generationOff])), futexWakeOp, everybody, 0, 0, 0)
}

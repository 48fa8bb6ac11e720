package node

import (
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/tessera-dra/tessera/hack/joints/testdata/module/pkg/keylock"
)

type locked struct {
	mu     sync.Mutex             // want: lock
	a, b   sync.RWMutex           // want: lock, lock
	keys   keylock.Locks[string]  // want: lock
	shared *keylock.Locks[string] // want: lock
	byName map[string]*sync.Mutex // want: lock
	any    sync.Locker            // want: lock
	wakes                         // want: lock
	// These aren't locks by their type, whatever they are used for.
	once    sync.Once
	values  sync.Map
	backoff *flowcontrol.Backoff
	token   chan struct{}
}

type wakes struct {
	sync.Mutex // want: lock
	changed    chan struct{}
}

func locks(l *locked, passed *sync.Mutex) error {
	var mu sync.Mutex                          // want: lock
	made := new(sync.Mutex)                    // want: lock
	built := &wakes{}                          // want: lock
	many := map[string]*sync.Mutex{"": passed} // want: lock
	same := &l.mu
	found := l.byName[""]
	mu.Lock()
	same.Lock()
	found.Lock()
	made.Lock()
	built.Lock()
	many[""].Lock()
	return unix.Flock(0, unix.LOCK_EX) // want: lock
}

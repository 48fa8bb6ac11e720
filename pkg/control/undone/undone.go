// Package undone paces what reconcilers do again: writes to the API server that somebody else
// undoes, a second release of Tessera, or a program that restores or deletes objects. A write
// that succeeds needs no retry, so no retry's pause slows such a fight down. The delays of the
// work queues, which pace what failed, are here too: the packages that need one need the other.
package undone

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
)

// The first and the longest pause between attempts of what fails, for all work queues. Retries come soon and the pauses stay short, because
// the GPUs of a pool that could not be written can't be allocated.
const (
	FirstRetryDelay = 50 * time.Millisecond
	MaxRetryDelay   = 30 * time.Second
)

const (
	// Quiet is how long a write must have stayed for the next one to be the first again.
	Quiet = time.Minute
	// Fight is how often in a row a write must have been undone to be reported. Single
	// ones happen: an admin deletes an object, or the kubelet the slices of a plugin that ends.
	Fight = 3
)

// Writes remembers the last write of each key, which stands for a part of an object.
type Writes struct {
	clock clock.PassiveClock

	mu      sync.Mutex
	last    map[string]written
	dropped time.Time // when those that have stayed were dropped
}

type written struct {
	content [sha256.Size]byte // its hash: statuses are large
	at      time.Time
	undone  int           // how often in a row
	pause   time.Duration // before the content may be written again
	pauses  wait.Backoff
}

// LabelsOf is the key of the writes of a Node's labels. Other keys are with their writers; this one
// is shared, because package labels writes them and package nodes reports that they are undone.
func LabelsOf(node string) string { return "labels/" + node }

// New returns Writes that remember nothing yet.
func New(c clock.PassiveClock) *Writes {
	return &Writes{clock: c, last: make(map[string]written)}
}

// Left returns how long to wait before the content is written again; 0 for another content
// than the last one.
func (w *Writes) Left(key, content string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	last, ok := w.last[key]
	if !ok || last.content != sha256.Sum256([]byte(content)) {
		return 0
	}
	return max(0, last.pause-w.clock.Since(last.at))
}

// Record records that the content was written, and returns how often in a row it has been
// undone.
func (w *Writes) Record(key, content string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	now, sum := w.clock.Now(), sha256.Sum256([]byte(content))
	w.dropQuiet(now)
	last, ok := w.last[key]
	if !ok || last.content != sum || now.Sub(last.at) >= Quiet {
		w.last[key] = written{
			content: sum, at: now,
			pauses: wait.Backoff{Duration: time.Second, Factor: 2, Steps: 10, Cap: Quiet / 2},
		}
		return 0
	}
	last.at, last.pause = now, last.pauses.Step()
	last.undone++
	w.last[key] = last
	return last.undone
}

// dropQuiet drops, from time to time, the writes that have stayed: the next one is the first
// anyway, and most are of objects that are gone.
func (w *Writes) dropQuiet(now time.Time) {
	if now.Sub(w.dropped) < Quiet {
		return
	}
	w.dropped = now
	maps.DeleteFunc(w.last, func(_ string, last written) bool { return now.Sub(last.at) >= Quiet })
}

// Do calls write and records it, unless the content has to wait: then it returns an error from
// which Wait tells how long. It returns how often in a row the content has been undone.
func (w *Writes) Do(key, content string, write func() error) (int, error) {
	if left := w.Left(key, content); left > 0 {
		return 0, waitError{left}
	}
	if err := write(); err != nil {
		return 0, err
	}
	return w.Record(key, content), nil
}

// Undone returns how often in a row the last write has been undone.
func (w *Writes) Undone(key string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := w.last[key]
	if w.clock.Since(last.at) >= Quiet {
		return 0
	}
	return last.undone
}

// UntilQuiet returns how long until none of the writes counts as undone; 0 if none does.
func (w *Writes) UntilQuiet(keys ...string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var left time.Duration
	for _, key := range keys {
		if last, ok := w.last[key]; ok && last.undone > 0 {
			left = max(left, Quiet-w.clock.Since(last.at))
		}
	}
	return left
}

// Forget makes the next write of each key the first.
func (w *Writes) Forget(keys ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, key := range keys {
		delete(w.last, key)
	}
}

// Explain names the program that undoes a write, if that is known: its field manager.
func Explain(happens, managers string) string {
	return fmt.Sprintf("%s again and again by somebody else (%s). Look for a second release of Tessera, which may be of an older version, "+
		"and for programs that restore, prune or delete objects. Until that ends, the controller writes less and less often.",
		strings.ToUpper(happens[:1])+happens[1:], cmp.Or(managers, "it isn't known by whom"))
}

// Content returns an object as text that is the same for equal objects.
func Content(object any) string {
	text, err := json.Marshal(object)
	if err != nil {
		return err.Error() // never: objects are marshalled to be sent as well
	}
	return string(text)
}

type waitError struct{ left time.Duration }

func (e waitError) Error() string {
	return fmt.Sprintf("somebody else undoes this write: it is tried again in %s", e.left)
}

// Wait returns how long to wait, and no error, if Do returned the error because the content has
// to wait; of several joined errors, the shortest time. It returns other errors as they are.
func Wait(err error) (left time.Duration, other error) {
	e, ok := errors.AsType[waitError](err)
	if !ok {
		return 0, err
	}
	several, ok := errors.AsType[joined](err)
	if !ok {
		return e.left, nil
	}
	var others []error
	for _, e := range several.Unwrap() {
		l, e := Wait(e)
		left, others = Sooner(left, l), append(others, e)
	}
	return left, errors.Join(others...)
}

// joined is an error of errors.Join.
type joined interface {
	error
	Unwrap() []error
}

// Sooner returns the shorter one of two waits; 0 is none.
func Sooner(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

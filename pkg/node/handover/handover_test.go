package handover_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/node/handover"
)

var request = handover.Request{PodUID: "pod-b", Service: "/plugins/dra-pod-b.sock"}

// socket returns a path that is short enough for a socket.
func socket(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "handover") //nolint:usetesting // t.TempDir has the test's name in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "s")
}

// awaited is the result of Await.
type awaited struct {
	accepted *handover.Accepted
	err      error
}

// await calls Await through offer, and returns when it listens.
func await(t *testing.T, path string, offer func() (*handover.Accepted, error)) <-chan awaited {
	t.Helper()
	result := make(chan awaited, 1)
	go func() {
		a, err := offer()
		result <- awaited{a, err}
	}()
	for {
		conn, err := net.Dial("unix", path)
		if err == nil {
			conn.Close()
			return result
		}
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal(err)
		}
	}
}

func all(handover.Request) error { return nil }

// asked is the result of Ask.
type asked struct {
	granted handover.Granted
	err     error
}

func ask(ctx context.Context, path string) <-chan asked {
	result := make(chan asked, 1)
	go func() {
		g, err := handover.Ask(ctx, path, request)
		result <- asked{g, err}
	}()
	return result
}

func TestHandover(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	path := socket(t)
	if err := os.WriteFile(path, nil, 0o600); err != nil { // of a plugin that was killed
		t.Fatal(err)
	}
	offered := await(t, path, func() (*handover.Accepted, error) { return handover.Await(ctx, path, all) })
	answers := ask(ctx, path)
	a := <-offered
	if a.err != nil {
		t.Fatal(a.err)
	}
	if diff := cmp.Diff(request, a.accepted.Request); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket of a plugin that hands over: %v, want it removed", err)
	}
	if len(answers) > 0 {
		t.Error("the node is granted before it is released")
	}
	lock, held := lockOf(t)
	if err := errors.Join(a.accepted.Give("pod-a", lock), lock.Close()); err != nil {
		t.Fatal(err)
	}
	answer := <-answers
	if answer.err != nil {
		t.Fatal(answer.err)
	}
	if answer.granted.PodUID != "pod-a" {
		t.Errorf("the plugin before is %q", answer.granted.PodUID)
	}
	if _, err := answer.granted.Lock.WriteString("mine"); err != nil {
		t.Error(err)
	}
	if err := answer.granted.Lock.Close(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(held); err != nil || string(got) != "mine" {
		t.Errorf("the lock that was given is another file: %q, %v", got, err)
	}
}

// lockOf returns a file that stands for the lock, and one that can be read to its end when
// nobody has the lock any more.
func lockOf(t *testing.T) (lock, held *os.File) {
	t.Helper()
	held, lock, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close(); held.Close() })
	return lock, held
}

func TestNobodyOffers(t *testing.T) {
	path := socket(t)
	if _, err := handover.Ask(t.Context(), path, request); !errors.Is(err, handover.ErrNobody) {
		t.Errorf("without a socket: %v", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if _, err := handover.Ask(t.Context(), path, request); !errors.Is(err, handover.ErrNobody) {
		t.Errorf("with the socket of a plugin that was killed: %v", err)
	}
}

// TestRefusal checks that a plugin that refuses one request accepts the next.
func TestRefusal(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	path := socket(t)
	refusals := []error{errors.New("too early"), nil}
	accept := func(handover.Request) error {
		err := refusals[0]
		refusals = refusals[1:]
		return err
	}
	offered := await(t, path, func() (*handover.Accepted, error) { return handover.Await(ctx, path, accept) })
	if _, err := handover.Ask(ctx, path, request); !errors.Is(err, handover.ErrRefused) || !strings.Contains(err.Error(), "too early") {
		t.Errorf("got %v, want the refusal and its reason", err)
	}
	answers := ask(ctx, path)
	a := <-offered
	if a.err != nil {
		t.Fatal(a.err)
	}
	// A plugin that can't release the node ends.
	if err := a.accepted.Close(); err != nil {
		t.Error(err)
	}
	if answer := <-answers; answer.err == nil || errors.Is(answer.err, handover.ErrRefused) {
		t.Errorf("got %v, want an error that isn't a refusal", answer.err)
	}
}

// TestSuccessorEnds checks that nobody has a lock that was given to a successor that has
// ended, or ends without having read the answer.
func TestSuccessorEnds(t *testing.T) {
	for name, before := range map[string]bool{"before the answer": true, "after it": false} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			path := socket(t)
			offered := await(t, path, func() (*handover.Accepted, error) { return handover.Await(ctx, path, all) })
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write([]byte(`{"podUID":"pod-b"}` + "\n")); err != nil {
				t.Fatal(err)
			}
			a := <-offered
			if a.err != nil {
				t.Fatal(a.err)
			}
			if before {
				conn.Close()
			}
			lock, held := lockOf(t)
			if err := a.accepted.Give("pod-a", lock); (err == nil) == before {
				t.Errorf("the plugin before: %v", err)
			}
			lock.Close()
			conn.Close()
			if _, err := io.ReadAll(held); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAnswerWithoutLock checks that the successor doesn't take a node over whose lock it
// doesn't get.
func TestAnswerWithoutLock(t *testing.T) {
	path := socket(t)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answers := ask(t.Context(), path)
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(`{"podUID":"pod-a"}` + "\n")); err != nil {
		t.Fatal(err)
	}
	if answer := <-answers; answer.err == nil || !strings.Contains(answer.err.Error(), "not with the lock") {
		t.Errorf("got %v", answer.err)
	}
}

func TestContextEnds(t *testing.T) {
	path := socket(t)
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	offered := await(t, path, func() (*handover.Accepted, error) { return handover.Await(ctx, path, all) })
	cancel()
	if a := <-offered; !errors.Is(a.err, context.Canceled) {
		t.Errorf("Await: %v", a.err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket: %v, want it removed", err)
	}

	offered = await(t, path, func() (*handover.Accepted, error) { return handover.Await(t.Context(), path, all) })
	ctx, cancel = context.WithCancel(t.Context())
	answers := ask(ctx, path)
	a := <-offered
	if a.err != nil {
		t.Fatal(a.err)
	}
	cancel()
	if answer := <-answers; answer.err == nil {
		t.Error("Ask goes on after its context's end")
	}
	if err := a.accepted.Close(); err != nil {
		t.Error(err)
	}
}

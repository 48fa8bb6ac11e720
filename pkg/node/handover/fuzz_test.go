package handover_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/node/handover"
)

// FuzzMessages sends the same bytes as a request and, with a lock, as an answer, and ends the
// connection. Only a whole line of JSON may be taken for a message.
func FuzzMessages(f *testing.F) {
	for _, seed := range []string{
		"", "\n", "{}\n", "null\n", "[]\n", `{"podUID":true}` + "\n", `{"podUID":"pod-a"`, `{"podUID":"pod-a"}`,
		`{"podUID":"pod-b","service":"/plugins/dra-pod-b.sock"}` + "\n", `{"podUID":"pod-b","service":"/plug`,
		`{"podUID":"pod-a"}` + "\n", `{"refused":"too early"}` + "\r\n{}\n", `{"refused":` + "\n" + `"too early"}`,
		`{"podUID":"` + strings.Repeat("b", handover.Longest) + `"}` + "\n",
	} {
		f.Add([]byte(seed))
	}
	path := socket(f)
	l, err := net.Listen("unix", path)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { l.Close() })
	lock, err := os.CreateTemp(f.TempDir(), "lock")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { lock.Close() })
	f.Fuzz(func(t *testing.T, data []byte) {
		line, _, _ := bytes.Cut(data, []byte("\n"))
		whole := json.Valid(line) && len(line) < handover.Longest
		from(t, data, func(conn net.Conn) {
			if _, err := handover.Read(conn); err == nil && !whole {
				t.Errorf("read a request from %q", line)
			}
		})
		var other sync.WaitGroup
		other.Go(func() {
			if conn, err := l.Accept(); err == nil {
				n, _, _ := conn.(*net.UnixConn).WriteMsgUnix(data[:min(1, len(data))], unix.UnixRights(int(lock.Fd())), nil)
				answerWith(conn, data[n:])
			}
		})
		granted, err := handover.Ask(t.Context(), path, request)
		if err == nil {
			if !whole {
				t.Errorf("the node counts as granted after %q", line)
			}
			granted.Lock.Close()
		}
		other.Wait()
	})
}

// from calls read with a connection from whose other end the data comes, and then its end.
func from(t *testing.T, data []byte, read func(net.Conn)) {
	t.Helper()
	here, there := net.Pipe()
	var other sync.WaitGroup
	other.Go(func() { answerWith(there, data) })
	read(here)
	here.Close()
	other.Wait()
}

// answerWith writes the data, ends the connection, and drops what the other end sends. That
// may close first.
func answerWith(conn net.Conn, data []byte) {
	var reads sync.WaitGroup
	reads.Go(func() { io.Copy(io.Discard, conn) })
	conn.Write(data)
	conn.Close()
	reads.Wait()
}

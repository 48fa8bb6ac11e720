package supervisor

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/mps"
)

// mortal is a program of MPS that starts, or has started, a server each time it is asked
// for one. The server soon ends.
const mortal = `#!/bin/sh
[ "$1" = --help ] && exit 0
while read -r line; do
  case "$line" in
    get_server_list) sleep 0.2 >/dev/null 2>&1 & echo $!; echo >> "$0.servers" ;;
    get_server_status*) echo ACTIVE ;;
  esac
done
`

// TestFailuresAreRetriedSeldom: a goroutine of the supervisor whose work fails at once each
// time repeats, logs and reports it a few times a minute, and less often later.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	record := mps.Record{Daemon: one("a"), PID: os.Getpid(), Restarts: 1}
	for name, tc := range map[string]struct {
		prepare func(n *node)
		work    func(ctx context.Context, s *Supervisor)
		// attempts counts what was tried.
		attempts func(n *node, s *Supervisor) int
	}{
		"a daemon that can't be started again": {
			prepare:  func(n *node) { n.drop("bin/" + program) },
			work:     func(ctx context.Context, s *Supervisor) { s.revive(ctx, record, "it has ended") },
			attempts: func(_ *node, s *Supervisor) int { return int(testutil.ToFloat64(s.metrics.restarts)) },
		},
		"a daemon whose server ends each time": {
			prepare: func(n *node) {
				n.drop("bin/" + program)
				n.put("bin/"+program, mortal)
			},
			work: func(ctx context.Context, s *Supervisor) {
				s.set("a", func(d *daemon) { d.record, d.phase = record, mps.Running })
				attending, cancel := s.outlive(ctx)
				s.tasks.Go(func() {
					defer cancel()
					s.attend(attending, record)
				})
			},
			attempts: func(n *node, _ *Supervisor) int {
				data, err := os.ReadFile(filepath.Join(n.cfg.DriverRoot, "bin", program+".servers"))
				if err != nil {
					n.t.Error(err)
				}
				return strings.Count(string(data), "\n")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			tc.prepare(n)
			synctest.Test(t, func(t *testing.T) {
				s, err := New(n.cfg)
				if err != nil {
					t.Fatal(err)
				}
				logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
				tc.work(klog.NewContext(t.Context(), logger), s)
				revision, tried, logged := s.now(), 0, 0
				for _, most := range []int{16, 5, 5} {
					time.Sleep(time.Minute)
					synctest.Wait()
					attempts := tc.attempts(n, s) - tried
					lines := len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data()) - logged
					reports := int(s.now() - revision)
					if attempts == 0 || attempts > most || lines > 3*most || reports > 3*most {
						t.Errorf("%d attempts, %d log lines and %d reports in a minute, want one to %d attempts", attempts, lines, reports, most)
					}
					revision, tried, logged = s.now(), tried+attempts, logged+lines
				}
				close(s.ended)
				s.tasks.Wait()
			})
		})
	}
}

// TestRepeatedStopIsNoNews: a daemon that can't be stopped is reported as that once, not
// with each attempt: reports make the plugin compare the daemons with what claims need.
func TestRepeatedStopIsNoNews(t *testing.T) {
	n := newNode(t)
	n.start("")
	n.ensure(one("a"))
	n.serving()
	busy := filepath.Join(string(n.at("a")), "busy") // a mount can't be removed
	if err := os.Mkdir(busy, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", busy, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(busy, unix.MNT_DETACH) }()
	var reports []mps.Report
	for range 3 {
		if _, err := n.Stop(t.Context(), "a"); err == nil {
			t.Fatal("it was removed")
		}
		report, err := n.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		reports = append(reports, report)
	}
	first, last := reports[0], reports[2]
	if len(first.Daemons) != 1 || first.Daemons[0].Phase != mps.Failed || !strings.Contains(first.Daemons[0].Message, "busy") {
		t.Errorf("after the first attempt: %+v", first.Daemons)
	}
	if last.Revision != first.Revision {
		t.Errorf("two more attempts were reported as %d changes", last.Revision-first.Revision)
	}
	if err := unix.Unmount(busy, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	n.gone("a")
}

func TestDelaysOfRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{RunDir: t.TempDir(), HostRoot: "/"})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []time.Duration{0, 1, 2, 4, 8, 16, 30, 30} {
			if got := s.nextDelay("a"); got != want*time.Second {
				t.Errorf("%s, want %d s", got, want)
			}
			time.Sleep(30 * time.Second)
		}
		if got := s.nextDelay("b"); got != 0 {
			t.Errorf("another daemon: %s", got)
		}
		time.Sleep(61 * time.Second)
		if got := s.nextDelay("a"); got != 0 {
			t.Errorf("after a minute without a restart: %s", got)
		}
	})
}

package healthmonitor_test

import (
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
)

func TestParseLogXID(t *testing.T) {
	id := func(n int) *int { return &n }
	for name, tc := range map[string]struct {
		record string
		want   healthmonitor.LogXID
	}{
		"an H100's": {
			"6,1234,5678,-;NVRM: Xid (PCI:0000:00:06): 31, pid=4711, name=train, channel 0x00000003, intr 00000000. MMU Fault: ENGINE GRAPHICS\n",
			healthmonitor.LogXID{PCI: "0000:00:06.0", Code: 31, Process: healthmonitor.Process{PID: 4711, Name: "train"}},
		},
		"of an instance": {
			"4,1,2,-,caller=T1;NVRM: Xid (PCI:0000:C1:00 GPU-I:05 GPU-CI:00): 13, pid=4711, name=a b, Graphics Exception\n SUBSYSTEM=pci\n",
			healthmonitor.LogXID{PCI: "0000:c1:00.0", Code: 13, GPUInstance: id(5), ComputeInstance: id(0), Process: healthmonitor.Process{PID: 4711, Name: "a b"}},
		},
		"without a process":       {"6,1,2,-;NVRM: Xid (PCI:0000:00:06): 79, GPU has fallen off the bus.\n", healthmonitor.LogXID{PCI: "0000:00:06.0", Code: 79}},
		"with an unknown process": {"6,1,2,-;NVRM: Xid (PCI:0000:00:06): 43, pid='<unknown>', name=<unknown>, channel 3\n", healthmonitor.LogXID{PCI: "0000:00:06.0", Code: 43}},
		"another message":         {"6,1,2,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n", healthmonitor.LogXID{}},
		"quoted by a program":     {"6,1,2,-;systemd[1]: NVRM: Xid (PCI:0000:00:06): 31, pid=1\n", healthmonitor.LogXID{}},
		"a name that looks like a process": {
			"6,1,2,-;NVRM: Xid (PCI:0000:00:06): 31, pid=4711, name=pid=1, channel 3\n",
			healthmonitor.LogXID{PCI: "0000:00:06.0", Code: 31, Process: healthmonitor.Process{PID: 4711, Name: "pid=1"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := healthmonitor.ParseLogXID(tc.record)
			if !reflect.DeepEqual(got, tc.want) || ok != (tc.want.Code != 0) {
				t.Errorf("got %+v, %v, want %+v", got, ok, tc.want)
			}
		})
	}
}

func FuzzParseLogXID(f *testing.F) {
	f.Add("6,1,2,-;NVRM: Xid (PCI:0000:00:06 GPU-I:05 GPU-CI:00): 31, pid=4711, name=train, channel 3\n")
	f.Add("6,1,2,-;NVRM: Xid (PCI:00000000:00:06): 31, pid=, name=\n")
	f.Fuzz(func(t *testing.T, record string) {
		x, ok := healthmonitor.ParseLogXID(record)
		if !ok && x != (healthmonitor.LogXID{}) {
			t.Errorf("%+v though it is no XID", x)
		}
		if ok && !strings.Contains(record, "NVRM: Xid (PCI:") || x.Process.PID < 0 {
			t.Errorf("%q is read as %+v", record, x)
		}
	})
}

// TestWhoWasHit: the pod of the process that the kernel log names, also if the log is
// behind; else all pods on the GPU.
func TestWhoWasHit(t *testing.T) {
	const line = "6,1,2,-;NVRM: Xid (PCI:0000:00:06): 31, pid=4711, name=train, channel 3\n"
	for name, tc := range map[string]struct {
		before, after string
		want          int // of the other pod's events
	}{
		"before the event":          {line, "", 0},
		"after the event":           {"", line, 0},
		"another GPU":               {strings.Replace(line, "00:06", "00:07", 1), "", 1},
		"a process of no pod":       {strings.Replace(line, "4711", "1", 1), "", 1},
		"an MPS server":             {strings.Replace(line, "train", "nvidia-cuda-mps", 1), "", 0},
		"no word of the kernel log": {"", "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *node) {
				n.write(tc.before)
				time.Sleep(time.Second)
				n.xid(gpu0, 31)
				time.Sleep(100 * time.Millisecond)
				n.write(tc.after)
				time.Sleep(time.Second)
				if n.eventsWith("training GPUError") != 1 || n.eventsWith("inference GPUError") != tc.want {
					t.Errorf("events %q, want one on training and %d on inference", n.events, tc.want)
				}
			})
		})
	}
}

// TestMPSClients: an error of one client ends all clients of a server, and the kernel
// log names any of them.
func TestMPSClients(t *testing.T) {
	asClient := func(p healthmonitor.Pod) healthmonitor.Pod { p.MPS = true; return p }
	for name, tc := range map[string]struct {
		log  string
		want string
	}{
		"the log names a client":      {"6,1,2,-;NVRM: Xid (PCI:0000:00:06): 31, pid=4711, name=train, channel 3\n", "training inference"},
		"the log names the server":    {"6,1,2,-;NVRM: Xid (PCI:0000:00:06): 31, pid=1, name=nvidia-cuda-mps, channel 3\n", "training inference partition"},
		"no word from the kernel log": {"", "training inference partition"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *node) {
				n.use(asClient(pod), asClient(other), healthmonitor.Pod{Namespace: "default", Name: "partition", UID: "w"})
				n.write(tc.log)
				time.Sleep(time.Second)
				n.xid(gpu0, 31)
				time.Sleep(2 * time.Second)
				for _, name := range []string{"training", "inference", "partition"} {
					want := 0
					if strings.Contains(tc.want, name) {
						want = 1
					}
					if got := n.eventsWith(name + " GPUError"); got != want {
						t.Errorf("pod %s has %d events, want %d: %q", name, got, want, n.events)
					}
				}
			})
		})
	}
}

func (n *node) write(record string) {
	f, err := os.OpenFile(n.log, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		n.t.Fatal(err)
	}
	defer f.Close()
	half := len(record) / 2
	for _, part := range []string{record[:half], record[half:]} {
		if _, err := f.WriteString(part); err != nil {
			n.t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

package healthmonitor

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/notify"
)

const (
	// logBuffer is more than a record of /dev/kmsg, which can only be read whole.
	logBuffer = 16 << 10
	// logPause is the pause at the end of a log that is a file, as the simulator's.
	logPause = 50 * time.Millisecond
	// loggedWithin is how far the log may be behind an event.
	loggedWithin = 500 * time.Millisecond
	// remembered is how many of the log's last XIDs are kept, and rememberedFor how
	// long.
	remembered    = 256
	rememberedFor = 5 * time.Second
)

// Process that had an error, in the host's PID namespace.
type Process struct {
	PID  int
	Name string
}

// LogXID is the message of an XID in the kernel log.
type LogXID struct {
	PCI  gpu.PCIAddress
	Code uint64
	// GPUInstance and ComputeInstance are nil where the error belongs to no instance.
	GPUInstance, ComputeInstance *int
	// Process is zero where the message names none.
	Process Process
}

// xidPattern matches the driver's messages, such as
// "NVRM: Xid (PCI:0000:00:06 GPU-I:05 GPU-CI:00): 31, pid=4711, name=train, channel …".
var xidPattern = regexp.MustCompile(`^NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?: GPU-I:(\d{1,4}))?(?: GPU-CI:(\d{1,4}))?\): (\d{1,9})\b(?:, (.*))?`)

var processPattern = regexp.MustCompile(`^pid=(\d{1,9})(?:, name=([^,]{1,64}))?`)

// ParseLogXID reads a record of /dev/kmsg. It returns false if that is no XID.
func ParseLogXID(record string) (LogXID, bool) {
	header, text, ok := strings.Cut(record, ";")
	if !ok || strings.Count(header, ",") < 2 || strings.HasPrefix(record, " ") {
		return LogXID{}, false
	}
	text, _, _ = strings.Cut(text, "\n")
	m := xidPattern.FindStringSubmatch(text)
	if m == nil {
		return LogXID{}, false
	}
	x := LogXID{PCI: gpu.NewPCIAddress(m[1] + ".0"), GPUInstance: number(m[2]), ComputeInstance: number(m[3])}
	x.Code, _ = strconv.ParseUint(m[4], 10, 64) // nine digits
	if p := processPattern.FindStringSubmatch(m[5]); p != nil {
		if pid := number(p[1]); *pid > 0 {
			x.Process = Process{PID: *pid, Name: p[2]}
		}
	}
	return x, true
}

// number reads up to nine digits; nil for none.
func number(digits string) *int {
	n, err := strconv.Atoi(digits)
	if err != nil {
		return nil
	}
	return &n
}

// suspect is a process that the kernel log has named.
type suspect struct {
	LogXID
	// pod is that of the process when the message was read: it may end soon.
	pod Pod
	at  time.Time
}

// kernelLog has the last XIDs of the kernel log that name a process.
type kernelLog struct {
	containers *containers.Containers

	mu       notify.Mutex // changes when there is another suspect
	open     bool         // it can be read
	suspects []suspect
}

func newKernelLog(c *containers.Containers) *kernelLog { return &kernelLog{containers: c} }

// follow reads the log from its end on, until ctx ends or it can't be read.
func (l *kernelLog) follow(ctx context.Context, path string) {
	logger := klog.FromContext(ctx)
	f, err := os.Open(path)
	if err == nil {
		defer context.AfterFunc(ctx, func() { f.Close() })()
		defer f.Close()
		_, err = f.Seek(0, io.SeekEnd)
	}
	if err != nil {
		logger.Info("The kernel log can't be read: all pods that use a GPU get the event of its error", "path", path, "err", err)
		return
	}
	l.setOpen(true)
	defer l.setOpen(false)
	r, record := bufio.NewReaderSize(f, logBuffer), ""
	for ctx.Err() == nil {
		part, err := r.ReadString('\n')
		record += part
		switch {
		case errors.Is(err, io.EOF):
			sleep(ctx, logPause)
			continue // with the rest of the record
		case errors.Is(err, syscall.EPIPE): // records were overwritten
		case err != nil:
			if ctx.Err() == nil {
				logger.Error(err, "The kernel log can't be read any more: all pods that use a GPU get the event of its error", "path", path)
			}
			return
		default:
			l.read(record)
		}
		record = ""
	}
}

func (l *kernelLog) setOpen(open bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = open
}

// read takes in a record.
func (l *kernelLog) read(record string) {
	x, ok := ParseLogXID(record)
	if !ok || x.Process.PID == 0 {
		return
	}
	namespace, name, uid := l.containers.PodOf(x.Process.PID)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.suspects = append(l.suspects, suspect{LogXID: x, pod: Pod{Namespace: namespace, Name: name, UID: uid}, at: time.Now()})
	if n := len(l.suspects); n > remembered {
		l.suspects = l.suspects[n-remembered:]
	}
	l.mu.Wake()
}

// find removes and returns the processes that had the XID on the GPU with that
// address. It waits a short time for the log, which may be a little behind.
func (l *kernelLog) find(ctx context.Context, x gpu.XID, address gpu.PCIAddress) []suspect {
	late := time.NewTimer(loggedWithin)
	defer late.Stop()
	for {
		found, added, open := l.take(x, address)
		if len(found) > 0 || !open {
			return found
		}
		select {
		case <-added:
		case <-late.C:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// take is find without waiting. added is closed when it is worth another try.
func (l *kernelLog) take(x gpu.XID, address gpu.PCIAddress) (found []suspect, added <-chan struct{}, open bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var rest []suspect
	for _, s := range l.suspects {
		logged := gpu.XID{GPU: x.GPU, Code: s.Code, GPUInstance: s.GPUInstance, ComputeInstance: s.ComputeInstance}
		switch {
		case s.at.Before(x.At.Add(-rememberedFor)):
		case s.PCI == address && errorKey(x) == errorKey(logged):
			found = append(found, s)
		default:
			rest = append(rest, s)
		}
	}
	l.suspects = rest
	return found, l.mu.Changed(), l.open
}

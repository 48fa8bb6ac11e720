package mps

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Program is a CUDA program that creates a context, allocates memory, keeps it
// for some time, and may fail. It reads its environment as CUDA does.
type Program struct {
	// Tag begins each line.
	Tag string
	// Device is the index among the devices that the program sees.
	Device int
	// Alloc lists sizes of memory, in bytes, to allocate one after the other.
	Alloc []uint64
	// Load is the percentage of the time in which the program then computes.
	Load uint32
	// Hold is the time for which the program then keeps running; if negative,
	// until ctx ends.
	Hold time.Duration
	// Fault ends the program with an illegal memory access.
	Fault bool
}

// ParseAlloc reads an amount of memory: a number of MiB, or with K, M or G.
func ParseAlloc(s string) (uint64, error) {
	n, ok := parseSize(s)
	if ok && s != "" && s[len(s)-1] >= '0' && s[len(s)-1] <= '9' {
		n, ok = parseSize(s + "M")
	}
	if !ok {
		return 0, fmt.Errorf("%q is not an amount of memory such as 2048 (MiB), 200M or 2G", s)
	}
	return n, nil
}

// errNoContext and errLost are the reasons for an early end of a Program, which
// has printed the details.
var (
	errNoContext = errors.New("no CUDA context")
	errLost      = errors.New("the CUDA context was lost")
)

// gpuContext is a CUDA context. An error text of "" means success.
type gpuContext interface {
	describe() reply
	ask(a ask) string
	// lost returns a channel that receives the error text when the context is
	// lost.
	lost() <-chan string
	close()
}

// Run runs the program: it prints its device and the result of each step. It
// returns an error if it got no context or lost it; a failed allocation is not
// an error.
func (p Program) Run(ctx context.Context, out io.Writer, open func() (*nvmlsim.Machine, error)) error {
	began := time.Now()
	c, problem := p.connect(ctx, open)
	if problem != "" {
		fmt.Fprintf(out, "%s context %s %d ms\n", p.Tag, problem, time.Since(began).Milliseconds())
		return errNoContext
	}
	defer c.close()
	fmt.Fprintf(out, "%s context %s %d ms\n", p.Tag, noError, time.Since(began).Milliseconds())
	d := c.describe()
	fmt.Fprintf(out, "%s SMs %d free %d total %d MiB\n", p.Tag, d.Multiprocessors, d.Free/mib, d.Total/mib)
	for _, n := range p.Alloc {
		fmt.Fprintf(out, "%s alloc %d MiB: %s\n", p.Tag, n/mib, orNoError(c.ask(ask{Alloc: n})))
	}
	if p.Load > 0 {
		fmt.Fprintf(out, "%s load %d %%: %s\n", p.Tag, p.Load, orNoError(c.ask(ask{Load: &p.Load})))
	}
	if p.Hold != 0 {
		if problem := p.hold(ctx, c, out); problem != "" {
			return errLost
		}
	}
	if p.Fault {
		fmt.Fprintf(out, "%s fault: %s\n", p.Tag, c.ask(ask{Fault: true}))
		return errLost
	}
	return nil
}

func orNoError(problem string) string {
	if problem == "" {
		return noError
	}
	return problem
}

func (p Program) hold(ctx context.Context, c gpuContext, out io.Writer) string {
	began := time.Now()
	var over <-chan time.Time
	if p.Hold > 0 {
		timer := time.NewTimer(p.Hold)
		defer timer.Stop()
		over = timer.C
	}
	problem := ""
	select {
	case problem = <-c.lost():
	case <-over:
	case <-ctx.Done():
	}
	fmt.Fprintf(out, "%s held %.1fs: %s\n", p.Tag, time.Since(began).Seconds(), orNoError(problem))
	return problem
}

// connect creates the context as CUDA does: through MPS if a control daemon
// listens in the pipe directory, otherwise directly on the GPU. The end of ctx ends the
// wait for a server.
func (p Program) connect(ctx context.Context, open func() (*nvmlsim.Machine, error)) (gpuContext, string) {
	m, err := open()
	if err != nil || m.Init() != nil {
		return nil, noDevice
	}
	var visible *string
	if v, set := os.LookupEnv(visibleEnv); set {
		visible = &v
	}
	conn, err := net.Dial("unix", controlSocket())
	if err != nil {
		return p.direct(m, visible)
	}
	c, problem := meetServer(ctx, conn, client{
		Name: os.Args[0], Namespace: pidNamespace(), Visible: visible, Device: p.Device,
		Memory: os.Getenv(memoryEnv), Threads: os.Getenv(threadsEnv),
	})
	if problem == "" && !sees(m, c.about.UUID) {
		c.close()
		problem = noDevice
	}
	if problem != "" {
		return nil, problem
	}
	return c, ""
}

// meetServer retries once if the server was killed just when it got the
// connection.
func meetServer(ctx context.Context, conn net.Conn, who client) (*remote, string) {
	for range 2 {
		c := &remote{conn: conn, r: bufio.NewReader(conn), replies: make(chan reply), gone: make(chan string, 1)}
		switch err := c.greet(ctx, who); {
		case err == nil && c.about.Error == "":
			go c.listen()
			return c, ""
		case err == nil:
			c.close()
			return nil, c.about.Error
		}
		c.close()
		if ctx.Err() != nil {
			return nil, notConnected
		}
		var err error
		if conn, err = net.Dial("unix", controlSocket()); err != nil {
			return nil, notConnected
		}
	}
	_ = conn.Close() // the server has sent no reply
	return nil, notConnected
}

// sees reports whether this program can use the device: in a container its
// device nodes must exist.
func sees(m *nvmlsim.Machine, uuid string) bool {
	return len(m.CUDADevices(&uuid)) > 0
}

func pidNamespace() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &st) != nil {
		return 0
	}
	return st.Ino
}

// remote is a context of an MPS server.
type remote struct {
	conn    net.Conn
	r       *bufio.Reader
	about   reply
	replies chan reply
	gone    chan string
}

func (c *remote) greet(ctx context.Context, who client) error {
	defer context.AfterFunc(ctx, func() { _ = c.conn.Close() })()
	if err := writeLine(c.conn, greeting{Client: &who}); err != nil {
		return err
	}
	return readLine(c.r, &c.about)
}

// listen returns when the connection ends, which is also the end of the
// context.
func (c *remote) listen() {
	defer close(c.replies)
	for {
		var r reply
		if readLine(c.r, &r) != nil {
			c.gone <- rpcFailed
			return
		}
		if r.Lost {
			c.gone <- r.Error
			return
		}
		c.replies <- r
	}
}

func (c *remote) describe() reply { return c.about }

func (c *remote) ask(a ask) string {
	if writeLine(c.conn, a) != nil {
		return c.why()
	}
	if r, ok := <-c.replies; ok {
		return r.Error
	}
	return c.why()
}

// why returns the error of a lost context. It can be called several times.
func (c *remote) why() string {
	problem := <-c.gone
	c.gone <- problem
	return problem
}

func (c *remote) lost() <-chan string { return c.gone }

// close returns when the server has released the resources of the context, or
// after a second.
func (c *remote) close() {
	defer c.conn.Close()
	u, ok := c.conn.(*net.UnixConn)
	if !ok || c.about.UUID == "" || u.CloseWrite() != nil || u.SetReadDeadline(time.Now().Add(time.Second)) != nil {
		return
	}
	for range c.replies { // closed by listen, when the server has closed
	}
}

// local is a context without MPS.
type local struct {
	machine *nvmlsim.Machine
	device  nvmlsim.CUDADevice
	holder  *nvmlsim.Holder // nil if the state is read-only, as in containers
	used    uint64
	percent uint32
}

func (p Program) direct(m *nvmlsim.Machine, visible *string) (gpuContext, string) {
	devices := m.CUDADevices(visible)
	if p.Device < 0 || p.Device >= len(devices) {
		return nil, noDevice
	}
	c := &local{machine: m, device: devices[p.Device]}
	h, err := m.Hold()
	if err != nil && !errors.Is(err, nvmlsim.NoPermission) {
		return nil, unknownError
	}
	c.holder = h
	if err := c.use(contextMemory(c.device.Multiprocessors) + directMemory); err != nil {
		return nil, errorText(err)
	}
	return c, ""
}

// use allocates n more bytes.
func (c *local) use(n uint64) error {
	var err error
	if c.holder == nil {
		err = c.device.Admits(c.used + n)
	} else {
		err = c.holder.Set([]nvmlsim.Use{{On: c.device, PID: uint32(os.Getpid()), Name: os.Args[0], Memory: c.used + n, Utilization: c.percent}})
	}
	if err == nil {
		c.used += n
	}
	return err
}

func (c *local) describe() reply {
	free := c.device.Free()
	if c.holder == nil {
		free -= min(c.used, free)
	}
	return reply{UUID: c.device.UUID, Multiprocessors: c.device.Multiprocessors, Free: free, Total: c.device.Memory}
}

func (c *local) ask(a ask) string {
	if a.Fault {
		_ = c.device.PageFault(uint32(os.Getpid()), os.Args[0]) // in containers nothing can be written
		return illegalAccess
	}
	if a.Load != nil {
		c.percent = *a.Load
	}
	if err := c.use(a.Alloc); err != nil {
		return errorText(err)
	}
	return ""
}

// lost reports a reboot.
func (c *local) lost() <-chan string {
	gone := make(chan string, 1)
	began := c.machine.State()
	go func() {
		if began == nil {
			return
		}
		c.machine.Await(context.Background(), func(s *nvmlsim.State) bool { return s.BootID != began.BootID })
		gone <- unknownError
	}()
	return gone
}

func (c *local) close() {
	if c.holder != nil {
		_ = c.holder.Close() // the end of the process does the same
	}
}

package mps

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

const (
	serverProgram = nvmlsim.MPSServerName
	// linkFD is the file descriptor of a server's link to the control daemon.
	linkFD = 3
	// startTime is the time from a server's start until it is ready (measured).
	startTime = 150 * time.Millisecond
	// maxClients is the limit for one device before CUDA 13.1.
	maxClients = 48
)

// server is nvidia-cuda-mps-server.
type server struct {
	control link
	log     journal
	holder  *nvmlsim.Holder
	devices []nvmlsim.CUDADevice

	mu       sync.Mutex
	threads  float64
	memory   limits
	lastID   int
	clients  []*guest
	served   int // connections, also those without a context yet
	draining bool
}

// guest is a client with a context.
type guest struct {
	connected
	conn   net.Conn
	device int
	used   uint64
	limit  uint64
	load   uint32
}

// RunServer is nvidia-cuda-mps-server, which only the control daemon starts. It
// returns the exit code after an order to end, or when the control daemon has
// died.
func RunServer(open func() (*nvmlsim.Machine, error)) int {
	control, err := openLink(os.NewFile(linkFD, "link"))
	if err != nil {
		fmt.Fprintln(os.Stderr, serverProgram+": it is started by nvidia-cuda-mps-control only")
		return 1
	}
	log, _ := openJournal("server.log", "Server")
	s := &server{control: control, log: log, threads: 100}
	log.printf("Startup")
	if err := s.start(open); err != nil {
		log.printf("Failed to start: %v", err)
		return 1
	}
	return s.serve()
}

func (s *server) start(open func() (*nvmlsim.Machine, error)) error {
	if err := s.receive(); err != nil { // the first order has its limits
		return fmt.Errorf("receive from control daemon: %w", err)
	}
	s.log.printf("Initializing server process")
	m, err := open()
	if err != nil {
		return err
	}
	go dieWith(m, m.State(), func(k nvmlsim.MPSKills) uint64 { return k.Server })
	time.Sleep(startTime)
	if err := m.Init(); err != nil {
		return err
	}
	var visible *string
	if v, set := os.LookupEnv(visibleEnv); set {
		visible = &v
	}
	if s.devices = m.CUDADevices(visible); len(s.devices) == 0 {
		return errors.New(noDevice)
	}
	var gpus []*nvmlsim.GPU
	for _, d := range s.devices {
		gpus = append(gpus, d.GPU)
	}
	if err := m.Meet("MPSServer", gpus...); err != nil {
		return err
	}
	if s.holder, err = m.Hold(); err != nil {
		return err
	}
	if err := s.hold(); err != nil {
		return err
	}
	for i, d := range s.devices {
		s.log.printf("Creating server context on device %d (%s)", i, d.GPU.Model().ProductName)
	}
	s.log.printf("Active Threads Percentage set to %.1f", s.threads)
	s.log.printf("Server has started")
	return s.control.send(report{Ready: true}, nil)
}

// dieWith kills this process when the machine is rebooted or MPS is killed,
// compared with the state began.
func dieWith(m *nvmlsim.Machine, began *nvmlsim.State, kills func(nvmlsim.MPSKills) uint64) {
	if began == nil {
		return // the machine's state can't be read here
	}
	m.Await(context.Background(), func(s *nvmlsim.State) bool {
		return s.BootID != began.BootID || kills(s.MPSKills) != kills(began.MPSKills)
	})
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
}

// hold writes the uses of the server and its clients to the machine's state.
// The caller has the lock, or is the only goroutine.
func (s *server) hold() error {
	var uses []nvmlsim.Use
	for _, d := range s.devices {
		uses = append(uses, nvmlsim.Use{On: d, PID: uint32(os.Getpid()), Name: serverProgram, Memory: serverMemory})
	}
	for _, g := range s.clients {
		uses = append(uses, nvmlsim.Use{On: s.devices[g.device], PID: g.PID, Name: g.Name, Memory: g.used, Utilization: g.load, MPSClient: true})
	}
	return s.holder.Set(uses)
}

// serve executes the orders of the control daemon until an order to quit or the
// daemon's end.
func (s *server) serve() int {
	for s.receive() == nil {
	}
	s.log.printf("Exiting")
	// Release the GPUs first: clients may read their state as soon as their
	// connection ends.
	if err := s.holder.Close(); err != nil {
		s.log.printf("%v", err)
	}
	return 0
}

// receive receives and executes one order.
func (s *server) receive() error {
	var o order
	f, err := s.control.receive(&o)
	if err != nil {
		return err
	}
	switch {
	case o.Client != nil && f != nil:
		conn, err := net.FileConn(f)
		_ = f.Close()
		if err == nil {
			s.count(1)
			go s.attend(conn, *o.Client)
		}
	case o.List > 0:
		return s.control.send(report{List: o.List, Devices: s.list()}, nil)
	case o.Drain:
		s.drain(time.Duration(o.Seconds) * time.Second)
	case o.Retire:
		s.retire()
	case o.Terminate > 0:
		s.drop(func(g *guest) bool { return g.PID == o.Terminate }, rpcFailed)
	default:
		s.limit(o)
	}
	return nil
}

func (s *server) limit(o order) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.Threads > 0 {
		s.threads = o.Threads
		s.log.printf("Active Threads Percentage set to %.1f", o.Threads)
	}
	if o.Memory != nil {
		s.memory = o.Memory
	}
	for i := range s.devices {
		if n := s.memory.of(i); o.Memory != nil && n>>62 == 0 {
			s.log.printf("Device pinned memory limit for device %d set to 0x%x bytes", i, n)
		}
	}
}

func (s *server) list() []served {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]served, len(s.devices))
	for i, d := range s.devices {
		p, _ := d.GPU.PCIInfo() // it was readable when the server started
		all[i] = served{UUID: d.UUID, Name: d.GPU.Model().ProductName, Bus: p.BusIDLegacy()}
	}
	for _, g := range s.clients {
		all[g.device].Clients = append(all[g.device].Clients, g.connected)
	}
	return all
}

// drain ends the server after its last client, or after a time.
func (s *server) drain(patience time.Duration) {
	s.log.printf("Server has been notified to shutdown")
	s.log.printf("Waiting for current clients to finish")
	if patience > 0 {
		time.AfterFunc(patience, s.exit)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	if len(s.clients) == 0 {
		s.exit()
	}
}

// retire ends the server if it serves nobody.
func (s *server) retire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.served > 0 {
		// (assumed: the real one's daemon logs "Server PID has N active worker threads. Server will not shutdown.")
		s.log.printf("Server has %d clients and does not shut down", s.served)
		return
	}
	s.draining = true
	s.exit()
}

func (s *server) count(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.served += n
}

// exit makes serve return.
func (s *server) exit() {
	_ = s.control.conn.Close() // the connection may be closed already
}

// attend serves one client until its connection ends.
func (s *server) attend(conn net.Conn, c client) {
	defer s.count(-1)
	defer conn.Close()
	s.log.printf("Received new client request for {PID: %d}", c.PID)
	g, problem := s.admit(conn, c)
	if problem != "" {
		_ = writeLine(conn, reply{Error: problem}) // the client sees that the connection ends
		return
	}
	s.log.printf("Client {PID: %d, Context ID: %d} connected", c.PID, g.ID)
	if writeLine(conn, s.describe(g)) == nil {
		s.answer(g)
	}
	s.log.printf("Client process %d disconnected", c.PID)
	s.drop(func(other *guest) bool { return other == g }, "")
}

// admit creates a client's context, or returns the error text for the client.
func (s *server) admit(conn net.Conn, c client) (*guest, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	numbers := make([]int, len(s.devices))
	for i := range numbers {
		numbers[i] = i
	}
	seen := nvmlsim.SelectVisible(c.Visible, numbers, numbers, func(i int) string { return s.devices[i].UUID })
	if c.Device < 0 || c.Device >= len(seen) {
		return nil, noDevice
	}
	g := &guest{connected: connected{client: c}, conn: conn, device: seen[c.Device]}
	g.limit = clientLimit(s.memory, c.Memory, g.device)
	g.used = contextMemory(s.multiprocessors(g))
	there := slices.DeleteFunc(slices.Clone(s.clients), func(o *guest) bool { return o.device != g.device })
	switch {
	case s.draining:
		return nil, notReady
	case len(there) >= maxClients:
		return nil, tooManyClients
	case g.used > g.limit:
		return nil, outOfMemory
	}
	s.lastID++
	g.ID = s.lastID
	s.clients = append(s.clients, g)
	if err := s.hold(); err != nil {
		s.clients = s.clients[:len(s.clients)-1]
		return nil, errorText(err)
	}
	return g, ""
}

func errorText(err error) string {
	switch {
	case errors.Is(err, nvmlsim.Memory):
		return outOfMemory
	case errors.Is(err, nvmlsim.InUse):
		return unavailable
	case errors.Is(err, nvmlsim.GPUIsLost):
		return noDevice
	}
	return unknownError
}

// multiprocessors returns the number of multiprocessors that a client can use.
// The caller has the lock.
func (s *server) multiprocessors(g *guest) uint32 {
	return portion(s.devices[g.device].Multiprocessors, clientPercentage(s.threads, g.Threads))
}

// describe returns the reply that describes a client's context.
func (s *server) describe(g *guest) reply {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.devices[g.device]
	return reply{
		UUID: d.UUID, Multiprocessors: s.multiprocessors(g), Total: d.Memory,
		Free: min(g.limit-g.used, d.Free()),
	}
}

func (s *server) answer(g *guest) {
	r := bufio.NewReader(g.conn)
	for {
		var a ask
		if readLine(r, &a) != nil {
			return
		}
		if a.Fault {
			if err := s.devices[g.device].PageFault(g.PID, g.Name); err != nil {
				s.log.printf("Cannot report the fault of client {PID: %d}: %v", g.PID, err)
			}
			// A fault affects all clients of the GPU (measured).
			s.drop(func(other *guest) bool { return other.device == g.device }, illegalAccess)
			return
		}
		if a.Load != nil {
			s.setLoad(g, *a.Load)
		}
		if writeLine(g.conn, reply{Error: s.alloc(g, a.Alloc)}) != nil {
			return
		}
	}
}

// setLoad takes effect with the next hold.
func (s *server) setLoad(g *guest, percent uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g.load = percent
}

func (s *server) alloc(g *guest, n uint64) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > g.limit-g.used {
		return outOfMemory
	}
	g.used += n
	if err := s.hold(); err != nil {
		g.used -= n
		return errorText(err)
	}
	return ""
}

// drop ends clients, and sends them the text why unless it is empty. A draining
// server ends with the last client.
func (s *server) drop(which func(*guest) bool, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients = slices.DeleteFunc(s.clients, func(g *guest) bool {
		if !which(g) {
			return false
		}
		if why != "" {
			_ = writeLine(g.conn, reply{Error: why, Lost: true}) // the client may have ended
			_ = g.conn.Close()
		}
		return true
	})
	if err := s.hold(); err != nil {
		s.log.printf("%s", strings.TrimSpace(err.Error()))
	}
	if s.draining && len(s.clients) == 0 {
		s.exit()
	}
}

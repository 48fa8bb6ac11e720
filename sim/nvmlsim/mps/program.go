package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

const usage = `CUDA MPS Control for Linux/Unix/QNX, stand-in of a simulated machine

  This program allows multiple CUDA processes to share a single GPU context.

nvidia-cuda-mps-control [options] [command]
OPTIONS:
  -h,--help                Print this message
  -d,--daemon              Setup the daemon in the background
  -f,--forground           Setup the daemon in the foreground
  -M,--multiuser-server    Enable multi-user mode
  -q,--ready-devices      Prepare the daemon to query devices on startup

COMMAND:
  start_server -uid <user id>
                       Start a new instance of nvidia-cuda-mps-server with the given user ID
  quit [-t <seconds>]
                       Terminate the controller
  get_server_list
                       Print out a list of servers
  get_server_status <PID>
                       Print out the status of the server
  get_client_list <PID>
                       List the client applications connected to the server
  get_device_client_list [<PID>]
                       List the devices and their client applications
  ps [-p PID]
                       Report a snapshot of the current client processes
  set_default_active_thread_percentage <percentage>
                       Set default active thread percentage for upcoming servers
  get_default_active_thread_percentage
                       Query the current default available thread percentage
  set_active_thread_percentage <PID> <percentage>
                       Override the active thread percentage of the MPS server
  get_active_thread_percentage <PID>
                       Query the current active thread percentage of the MPS server
  set_default_device_pinned_mem_limit <dev> <value>
                       Set default device pinned memory for upcoming servers
  get_default_device_pinned_mem_limit <dev>
                       Query the current default pinned memory limit for the device
  set_device_pinned_mem_limit <PID> <dev> <value>
                       Override the device pinned memory limit of the MPS server
  get_device_pinned_mem_limit <PID> <dev>
                       Query the pinned memory limit of the MPS server for the device
  terminate_client <server PID> <client PID>
                       Terminate a client process
`

// options holds the flags of nvidia-cuda-mps-control.
type options struct {
	help, daemon, foreground, multiuser bool
	command                             []string
}

func parseOptions(args []string) (options, error) {
	var o options
	for i, a := range args {
		switch a {
		case "-h", "--help":
			o.help = true
		case "-d", "--daemon":
			o.daemon = true
		case "-f", "--forground", "--foreground":
			o.foreground = true
		case "-M", "--multiuser-server":
			o.multiuser = true
		case "-q", "--ready-devices":
		default:
			if strings.HasPrefix(a, "-") {
				return o, fmt.Errorf("unrecognized option '%s'", a)
			}
			o.command = args[i:]
			return o, nil
		}
	}
	return o, nil
}

// readyEnv names the file descriptor on which the background daemon reports
// that it is ready ("") or why it isn't.
const readyEnv = "NVMLSIM_MPS_READY"

// RunControl is nvidia-cuda-mps-control: program is its path, args are its
// arguments, and the result is the exit code. Without -d and -f it sends the
// commands in in, one per line, to the running daemon.
func RunControl(program string, args []string, in io.Reader, out io.Writer, open func() (*nvmlsim.Machine, error)) int {
	o, err := parseOptions(args)
	switch {
	case err != nil:
		return say(out, err)
	case o.help:
		fmt.Fprint(out, usage)
		return 0
	case os.Getenv(readyEnv) != "":
		return background(program, o, open)
	case o.daemon:
		return daemonize(program, args, out)
	case o.foreground:
		return foreground(program, o, out, open)
	case len(o.command) > 0:
		return converse(strings.NewReader(strings.Join(o.command, " ")), out)
	}
	return converse(in, out)
}

func foreground(program string, o options, out io.Writer, open func() (*nvmlsim.Machine, error)) int {
	c, err := newControl(program, open, o.multiuser)
	if err != nil {
		return say(out, err)
	}
	c.serve()
	return 0
}

// daemonize starts the daemon and waits until it is ready.
func daemonize(program string, args []string, out io.Writer) int {
	r, w, err := os.Pipe()
	if err != nil {
		return say(out, err)
	}
	defer r.Close()
	null, feed, err := os.Pipe() // there may be no /dev/null
	if err != nil {
		return say(out, err)
	}
	defer null.Close()
	c := exec.Command(program, args...)
	c.Args[0] = "nvidia-cuda-mps-control"
	c.Env = append(os.Environ(), readyEnv+"=3")
	c.ExtraFiles = []*os.File{w}
	c.Stdin, c.Stdout, c.Stderr = null, feed, feed
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = c.Start()
	_, _ = w.Close(), feed.Close() // the daemon has its own copies
	if err != nil {
		return say(out, err)
	}
	text, err := io.ReadAll(r)
	switch {
	case err != nil:
		return say(out, err)
	case string(text) == ready:
		return 0
	case len(text) == 0:
		return say(out, errors.New("the daemon has died"))
	}
	return say(out, errors.New(string(text)))
}

const ready = "ready"

// background runs the daemon that daemonize started.
func background(program string, o options, open func() (*nvmlsim.Machine, error)) int {
	tell := os.NewFile(linkFD, "ready")
	syscall.CloseOnExec(linkFD)
	_ = os.Unsetenv(readyEnv) // the server must not inherit it
	c, err := newControl(program, open, o.multiuser)
	if err != nil {
		_, _ = io.WriteString(tell, err.Error()) // the parent may have ended
		return 1
	}
	_, _ = io.WriteString(tell, ready)
	_ = tell.Close()
	c.serve()
	return 0
}

// converse sends commands to the running daemon and prints the answers.
func converse(in io.Reader, out io.Writer) int {
	conn, err := net.Dial("unix", filepath.Join(pipeDirectory(), privilegedName))
	if err != nil { // not accessible to this user or in this container
		conn, err = net.Dial("unix", controlSocket())
	}
	if err != nil {
		fmt.Fprintln(out, noControlDaemon)
		return 1
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	// If there is no answer, the daemon has ended.
	gone := errors.New(noControlDaemon) //nolint:staticcheck // the program's words
	if writeLine(conn, greeting{UI: true}) != nil {
		return say(out, gone)
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) == 0 {
			continue
		}
		var answer string
		if writeLine(conn, lines.Text()) != nil || readLine(r, &answer) != nil {
			return say(out, gone)
		}
		fmt.Fprint(out, answer)
		if words[0] == "quit" && answer == "" {
			return 0
		}
	}
	return 0
}

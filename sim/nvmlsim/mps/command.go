package mps

import (
	"fmt"
	"strconv"
	"strings"
)

// commands has the operations that users of the control daemon can request.
type commands interface {
	acts
	views
	bounded
}

type acts interface {
	startServer(uid uint32)
	// quit returns when all servers have ended, at most after this number of
	// seconds; 0 means no limit.
	quit(seconds int)
	// terminate returns false if there is no such server.
	terminate(server, client uint32) bool
}

type views interface {
	servers() []uint32
	// status returns false if there is no such server.
	status(server uint32) (string, bool)
	list(server uint32) []served
}

// bounded changes the limits of future servers and of running ones. Its methods
// return false if there is no such server.
type bounded interface {
	defaults() bounds
	setDefaults(change func(*bounds))
	bounds(server uint32) (bounds, bool)
	setBounds(server uint32, change func(*bounds)) bool
}

// bounds holds limits of clients.
type bounds struct {
	threads float64
	memory  limits
}

// execute executes one line and returns the output with its newline; "" is no
// output. The answers to malformed lines are assumptions.
func execute(c commands, line string) string {
	words := strings.Fields(line)
	if len(words) == 0 {
		return ""
	}
	name, args := words[0], words[1:]
	for _, table := range []map[string]command{queries, limiters} {
		if run, ok := table[name]; ok {
			return run(c, args)
		}
	}
	return fmt.Sprintf("Unknown command \"%s\"\n", name)
}

// refuse returns the answer to a command that came through the socket for all
// users and is allowed only through the other socket; false if the command is
// executed. For start_server and commands about a server, except
// set_active_thread_percentage, that they are executed is an assumption.
func refuse(line string, uid uint32) (string, bool) {
	words := strings.Fields(line)
	switch {
	case len(words) == 0:
		return "", false
	case words[0] == "quit":
		return "Not enough privilege to execute quit command\n", true
	case strings.HasPrefix(words[0], "set_default_"):
		return fmt.Sprintf("Insufficient privileges for UID %d. Control deamon settings can only be modified by the user who started it or by the root user.\n", uid), true
	}
	return "", false
}

type command func(c commands, args []string) string

//nolint:gochecknoglobals // constant
var queries = map[string]command{
	"start_server":           startServer,
	"quit":                   quit,
	"get_server_list":        getServerList,
	"get_server_status":      getServerStatus,
	"get_client_list":        getClientList,
	"get_device_client_list": getDeviceClientList,
	"ps":                     ps,
	"terminate_client":       terminateClient,
}

//nolint:gochecknoglobals // constant
var limiters = map[string]command{
	"get_default_active_thread_percentage": func(c commands, _ []string) string {
		return percentage(c.defaults().threads)
	},
	"set_default_active_thread_percentage": func(c commands, args []string) string {
		return withPercentage(args, 0, func(p float64) string {
			c.setDefaults(func(b *bounds) { b.threads = p })
			return percentage(p)
		})
	},
	"get_active_thread_percentage": func(c commands, args []string) string {
		return withServer(args, func(pid uint32) (string, bool) {
			b, ok := c.bounds(pid)
			return percentage(b.threads), ok
		})
	},
	"set_active_thread_percentage": func(c commands, args []string) string {
		return withPercentage(args, 1, func(p float64) string {
			return withServer(args, func(pid uint32) (string, bool) {
				return percentage(p), c.setBounds(pid, func(b *bounds) { b.threads = p })
			})
		})
	},
	"get_default_device_pinned_mem_limit": func(c commands, args []string) string {
		if len(args) != 1 {
			return invalidArguments
		}
		return line(said(c.defaults().memory[args[0]]))
	},
	"set_default_device_pinned_mem_limit": func(c commands, args []string) string {
		return withSize(args, 1, func(value string) string {
			c.setDefaults(func(b *bounds) { b.memory[args[0]] = value })
			return ""
		})
	},
	"get_device_pinned_mem_limit": func(c commands, args []string) string {
		if len(args) != 2 {
			return invalidArguments
		}
		return withServer(args, func(pid uint32) (string, bool) {
			b, ok := c.bounds(pid)
			return line(said(b.memory[args[1]])), ok
		})
	},
	"set_device_pinned_mem_limit": func(c commands, args []string) string {
		return withSize(args, 2, func(value string) string {
			return withServer(args, func(pid uint32) (string, bool) {
				return "", c.setBounds(pid, func(b *bounds) { b.memory[args[1]] = value })
			})
		})
	},
}

const invalidArguments = "Invalid argument\n"

func percentage(p float64) string { return fmt.Sprintf("%.1f\n", p) }

func line(s string) string {
	if s == "" {
		return ""
	}
	return s + "\n"
}

// withPercentage calls do with the percentage in the last of n+1 arguments.
func withPercentage(args []string, n int, do func(float64) string) string {
	if len(args) != n+1 {
		return invalidArguments
	}
	p, ok := parsePercentage(args[n])
	if !ok {
		return invalidArguments
	}
	return do(p)
}

// withSize calls do with the amount of memory in the last of n+1 arguments.
func withSize(args []string, n int, do func(string) string) string {
	if len(args) != n+1 {
		return invalidArguments
	}
	if _, ok := parseSize(args[n]); !ok {
		return invalidArguments
	}
	return do(args[n])
}

// withServer calls do with the server's PID in the first argument.
func withServer(args []string, do func(uint32) (string, bool)) string {
	if len(args) == 0 {
		return invalidArguments
	}
	pid, err := strconv.ParseUint(args[0], 10, 32)
	if err != nil {
		return invalidArguments
	}
	text, ok := do(uint32(pid))
	if !ok {
		return fmt.Sprintf("Server %d not found\n", pid)
	}
	return text
}

func startServer(c commands, args []string) string {
	if len(args) != 2 || args[0] != "-uid" {
		return invalidArguments
	}
	uid, err := strconv.ParseUint(args[1], 10, 32)
	if err != nil {
		return invalidArguments
	}
	c.startServer(uint32(uid))
	return ""
}

func quit(c commands, args []string) string {
	seconds := 0
	if len(args) > 0 {
		n, err := strconv.ParseUint(args[len(args)-1], 10, 16)
		if len(args) != 2 || args[0] != "-t" || err != nil {
			return invalidArguments
		}
		seconds = max(int(n), 1)
	}
	c.quit(seconds)
	return ""
}

func getServerList(c commands, _ []string) string {
	var b strings.Builder
	for _, pid := range c.servers() {
		fmt.Fprintln(&b, pid)
	}
	return b.String()
}

func getServerStatus(c commands, args []string) string {
	return withServer(args, func(pid uint32) (string, bool) {
		s, ok := c.status(pid)
		return line(s), ok
	})
}

func getClientList(c commands, args []string) string {
	return withServer(args, func(pid uint32) (string, bool) {
		if _, ok := c.status(pid); !ok {
			return "", false
		}
		var b strings.Builder
		for _, d := range c.list(pid) {
			for _, client := range d.Clients {
				fmt.Fprintln(&b, client.PID)
			}
		}
		return b.String(), true
	})
}

// chosen returns the servers that the arguments select: one by its PID, or all.
func chosen(c commands, args []string) []uint32 {
	if len(args) == 0 {
		return c.servers()
	}
	pid, err := strconv.ParseUint(args[len(args)-1], 10, 32)
	if err != nil {
		return nil
	}
	return []uint32{uint32(pid)}
}

func getDeviceClientList(c commands, args []string) string {
	var b strings.Builder
	for _, pid := range chosen(c, args) {
		for i, d := range c.list(pid) {
			fmt.Fprintf(&b, "[%d] %s, %s\n", i, d.Bus[len(d.Bus)-len("00:00.0"):], d.Name)
			for _, client := range d.Clients {
				fmt.Fprintf(&b, "%d.1\n", client.PID)
			}
		}
	}
	return b.String()
}

func ps(c commands, args []string) string {
	const row = "%-10v%-10v%-15v%-26v%-15v%-15v\n"
	var b strings.Builder
	fmt.Fprintf(&b, row, "PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND")
	only := uint32(0)
	if len(args) == 2 && args[0] == "-p" {
		pid, _ := strconv.ParseUint(args[1], 10, 32) // no client has PID 0
		only = uint32(pid)
	}
	for _, pid := range c.servers() {
		for _, d := range c.list(pid) {
			for _, client := range d.Clients {
				if len(args) == 0 || client.PID == only {
					fmt.Fprintf(&b, row, client.PID, client.ID, pid, d.UUID[:min(22, len(d.UUID))], client.Namespace, client.Name)
				}
			}
		}
	}
	return b.String()
}

func terminateClient(c commands, args []string) string {
	if len(args) != 2 {
		return invalidArguments
	}
	client, err := strconv.ParseUint(args[1], 10, 32)
	if err != nil {
		return invalidArguments
	}
	return withServer(args, func(pid uint32) (string, bool) { return "", c.terminate(pid, uint32(client)) })
}

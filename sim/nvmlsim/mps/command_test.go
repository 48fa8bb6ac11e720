package mps

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

// fake has one server, 42, with two clients.
type fake struct {
	upcoming, own bounds
	did           []string
}

func newFake() *fake {
	return &fake{upcoming: bounds{threads: 100, memory: limits{}}, own: bounds{threads: 100, memory: limits{}}}
}

func (f *fake) startServer(uid uint32) { f.did = append(f.did, fmt.Sprint("start ", uid)) }
func (f *fake) quit(seconds int)       { f.did = append(f.did, fmt.Sprint("quit ", seconds)) }
func (f *fake) servers() []uint32      { return []uint32{42} }

func (f *fake) terminate(server, client uint32) bool {
	f.did = append(f.did, fmt.Sprint("terminate ", client))
	return server == 42
}

func (f *fake) status(server uint32) (string, bool) { return "ACTIVE", server == 42 }

func (f *fake) list(server uint32) []served {
	if server != 42 {
		return nil
	}
	return []served{{
		UUID: "GPU-28933e90-dc02-c686-9dc4-c13a6a380b41", Name: "NVIDIA H200", Bus: "0000:00:06.0",
		Clients: []connected{
			{client: client{Name: "/tmp/c", Namespace: 4026531836, PID: 572}, ID: 6},
			{client: client{Name: "/tmp/c", Namespace: 4026531836, PID: 571}, ID: 7},
		},
	}}
}

func (f *fake) defaults() bounds                    { return f.upcoming }
func (f *fake) setDefaults(change func(*bounds))    { change(&f.upcoming) }
func (f *fake) bounds(server uint32) (bounds, bool) { return f.own, server == 42 }

func (f *fake) setBounds(server uint32, change func(*bounds)) bool {
	if server == 42 {
		change(&f.own)
	}
	return server == 42
}

func TestExecute(t *testing.T) {
	const head = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n"
	const first = "572       6         42             GPU-28933e90-dc02-c686    4026531836     /tmp/c         \n"
	const second = "571       7         42             GPU-28933e90-dc02-c686    4026531836     /tmp/c         \n"
	session := newFake() // one for all lines: settings persist from line to line
	for _, c := range []struct{ line, want, did string }{
		{"", "", ""},
		{"bogus", "Unknown command \"bogus\"\n", ""},
		{"bogus 1", "Unknown command \"bogus\"\n", ""},
		{"start_server -uid 7", "", "start 7"},
		{"start_server", invalidArguments, ""},
		{"quit", "", "quit 0"},
		{"quit -t 3", "", "quit 3"},
		{"quit -t 0", "", "quit 1"},
		{"quit -t", invalidArguments, ""},
		{"quit 3", invalidArguments, ""},
		{"get_server_list", "42\n", ""},
		{"get_server_status 42", "ACTIVE\n", ""},
		{"get_server_status 43", "Server 43 not found\n", ""},
		{"get_server_status", invalidArguments, ""},
		{"get_client_list 42", "572\n571\n", ""},
		{"get_client_list 43", "Server 43 not found\n", ""},
		{"get_device_client_list", "[0] 00:06.0, NVIDIA H200\n572.1\n571.1\n", ""},
		{"get_device_client_list 42", "[0] 00:06.0, NVIDIA H200\n572.1\n571.1\n", ""},
		{"get_device_client_list 43", "", ""},
		{"ps", head + first + second, ""},
		{"ps -p 571", head + second, ""},
		{"terminate_client 42 571", "", "terminate 571"},
		{"set_default_active_thread_percentage 25", "25.0\n", ""},
		{"get_default_active_thread_percentage", "25.0\n", ""},
		{"set_default_active_thread_percentage 0", invalidArguments, ""},
		{"set_default_active_thread_percentage 101", invalidArguments, ""},
		{"set_default_active_thread_percentage", invalidArguments, ""},
		{"get_active_thread_percentage 42", "100.0\n", ""},
		{"set_active_thread_percentage 42 10", "10.0\n", ""},
		{"get_active_thread_percentage 42", "10.0\n", ""},
		{"set_active_thread_percentage 43 10", "Server 43 not found\n", ""},
		{"set_default_device_pinned_mem_limit 0 3G", "", ""},
		{"get_default_device_pinned_mem_limit 0", "3G\n", ""},
		{"get_default_device_pinned_mem_limit 1", "", ""},
		{"set_default_device_pinned_mem_limit 0 71513M", "", ""},
		{"get_default_device_pinned_mem_limit 0", "69G\n", ""},
		{"set_default_device_pinned_mem_limit 0 much", invalidArguments, ""},
		{"set_default_device_pinned_mem_limit 0", invalidArguments, ""},
		{"set_device_pinned_mem_limit 42 0 512M", "", ""},
		{"get_device_pinned_mem_limit 42 0", "512M\n", ""},
		{"set_device_pinned_mem_limit 43 0 512M", "Server 43 not found\n", ""},
		{"get_device_pinned_mem_limit 42", invalidArguments, ""},
	} {
		t.Run(c.line, func(t *testing.T) {
			session.did = nil
			if got := execute(session, c.line); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if did := strings.Join(session.did, ", "); did != c.did {
				t.Errorf("did %q, want %q", did, c.did)
			}
		})
	}
}

// User 65534 got these answers on an H200.
func TestRefuse(t *testing.T) {
	const settings = "Insufficient privileges for UID 65534. Control deamon settings can only be modified by the user who started it or by the root user.\n"
	for line, want := range map[string]string{
		"":                                     "",
		"get_server_list":                      "",
		"get_default_active_thread_percentage": "",
		"set_active_thread_percentage 650 10":  "",
		"set_default_active_thread_percentage 77":   settings,
		"set_default_device_pinned_mem_limit 0 20G": settings,
		"quit":      "Not enough privilege to execute quit command\n",
		"quit -t 1": "Not enough privilege to execute quit command\n",
	} {
		if got, refused := refuse(line, 65534); got != want || refused != (want != "") {
			t.Errorf("%q: %q, refused %t", line, got, refused)
		}
	}
}

// For any input the daemon answers in complete lines, and limits stay valid.
func FuzzExecute(f *testing.F) {
	for _, line := range []string{
		"", "ps", "ps -p", "quit -t 99999999999", "start_server -uid -1", "get_server_status x", "set_default_active_thread_percentage NaN",
		"set_default_active_thread_percentage 1e-300", "set_active_thread_percentage 42 +Inf", "set_device_pinned_mem_limit 42 0 1G",
		"set_default_device_pinned_mem_limit 0 18446744073709551615G", "get_device_client_list 4294967296", "terminate_client 42", "\x00",
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		c := newFake()
		out := execute(c, line)
		if out != "" && !strings.HasSuffix(out, "\n") {
			t.Errorf("%q: %q is no line", line, out)
		}
		if utf8.ValidString(line) && !utf8.ValidString(out) {
			t.Errorf("%q: %q", line, out)
		}
		for _, b := range []bounds{c.upcoming, c.own} {
			if !(b.threads > 0 && b.threads <= 100) {
				t.Errorf("%q: %v %%", line, b.threads)
			}
			for _, value := range b.memory {
				if _, ok := parseSize(value); !ok {
					t.Errorf("%q: memory limit %q", line, value)
				}
			}
		}
	})
}

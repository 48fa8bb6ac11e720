// Command cdi-hook is NVIDIA's nvidia-cdi-hook, as which it is installed on nodes: container
// runtimes start it before each container with a GPU. Each hook is NVIDIA's. What it adds is that
// one process runs several of them (pkg/cdihook): starting a process for each took longer than
// most of them do.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook/commands"
	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/cdihook"
)

func main() {
	if err := run(context.Background(), os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "nvidia-cdi-hook:", err)
		os.Exit(1)
	}
}

// run runs the hooks in order until one fails.
func run(ctx context.Context, args []string) error {
	hooks := cdihook.Split(args)
	if len(hooks) > 1 {
		state, err := keep(os.Stdin)
		if err != nil {
			return fmt.Errorf("read the container's state: %w", err)
		}
		defer state.Close()
		os.Stdin = state
	}
	for i, hook := range hooks {
		if i > 0 {
			if _, err := os.Stdin.Seek(0, io.SeekStart); err != nil {
				return fmt.Errorf("read the container's state again: %w", err)
			}
		}
		command := commands.ConfigureCDIHookCommand(logger{}, &cli.Command{
			Name:  "nvidia-cdi-hook",
			Usage: "Prepares containers for NVIDIA GPUs; container runtimes start it. A + between hooks runs one after the other.",
		})
		if err := command.Run(ctx, append([]string{"nvidia-cdi-hook"}, hook...)); err != nil {
			if len(hook) == 0 {
				return err
			}
			return fmt.Errorf("%s: %w", hook[0], err)
		}
	}
	return nil
}

// keep copies what the runtime says of the container, so that each hook can read it. The copy
// is in memory: the file system that the hook sees is the container's.
func keep(from io.Reader) (*os.File, error) {
	const name = "container-state"
	// Hosts may refuse files in memory that could be executed (vm.memfd_noexec).
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), name)
	if _, err := io.Copy(file, from); err != nil {
		file.Close()
		return nil, err
	}
	_, err = file.Seek(0, io.SeekStart)
	return file, err
}

// logger prints what concerns whoever reads why a container didn't start: runtimes show what a
// failed hook has printed.
type logger struct{}

func (logger) Debugf(string, ...any) {}
func (logger) Tracef(string, ...any) {}

func (logger) Infof(format string, args ...any)    { say(format, args) }
func (logger) Warningf(format string, args ...any) { say(format, args) }
func (logger) Errorf(format string, args ...any)   { say(format, args) }

func say(format string, args []any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

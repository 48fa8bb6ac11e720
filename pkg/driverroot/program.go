package driverroot

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// Program is one of the driver's programs, with the settings to run it.
type Program struct {
	// Root is the directory of the host that has to be the program's root: "/", or
	// the driver root if that is a complete system with a loader.
	Root string
	// Path is the path of the program below Root.
	Path string
	// Env is the environment that it needs to find its libraries and the driver's
	// other programs.
	Env []string
}

// NoProgramError means that this installation of the driver lacks a program.
type NoProgramError struct {
	Program string
	// Looked has the searched directories of the host.
	Looked []string
}

func (e *NoProgramError) Error() string {
	return fmt.Sprintf("this driver installation has no %s (looked in %s): install the driver's user space completely, or correct --driver-root",
		e.Program, strings.Join(e.Looked, ", "))
}

// Program finds one of the driver's programs, such as "nvidia-smi"; it returns
// a NoProgramError if there is none.
func (r Root) Program(h Host, name string) (Program, error) {
	if p, err := r.inside(h, name); err != nil || p.Path != "" {
		return p, err
	}
	p := Program{Root: "/"}
	var dirs []string
	err := h.Do(func() error {
		dirs = r.programDirs(r.Path)
		p.Path = Locate(dirs, name)
		return nil
	})
	if err != nil {
		return Program{}, err
	}
	if p.Path == "" {
		return Program{}, &NoProgramError{Program: name, Looked: dirs}
	}
	p.Env = environment(p.Path, r.libraryPath())
	return p, nil
}

// ProgramDirs returns the directories of the host in which Program looks, the likeliest first.
func (r Root) ProgramDirs(h Host) (dirs []string, err error) {
	err = h.Do(func() error {
		dirs = r.programDirs(r.Path)
		return nil
	})
	return dirs, err
}

// inside finds the program in a driver root that has the program's loader: such
// a root may have another C library than the host, so the program runs only
// there. Otherwise the result has no Path.
func (r Root) inside(h Host, name string) (Program, error) {
	if r.Path == "/" {
		return Program{}, nil
	}
	p := Program{Root: r.Path}
	err := NewHost(h.Path(r.Path)).Do(func() error {
		path := Locate(r.programDirs("/"), name)
		if path == "" {
			return nil
		}
		loader, err := interpreter(path)
		if err != nil {
			return fmt.Errorf("look at %s of the driver root %s: %w", path, r.Path, err)
		}
		if isFile(loader) {
			p.Path = path
		}
		return nil
	})
	if err != nil || p.Path == "" {
		return Program{}, err
	}
	var dirs []string
	for _, dir := range r.LibraryDirs {
		dirs = append(dirs, filepath.Join("/", strings.TrimPrefix(dir, r.Path)))
	}
	p.Env = environment(p.Path, dirs)
	return p, nil
}

// Command returns the command that runs one of the driver's programs as on the
// host: with the right root directory and libraries, and no other environment.
// It needs CAP_SYS_CHROOT unless the host is mounted at "/". It returns a
// NoProgramError if there is no such program.
func (r Root) Command(ctx context.Context, h Host, name string, args ...string) (*exec.Cmd, error) {
	p, err := r.Program(h, name)
	if err != nil {
		return nil, err
	}
	return p.Command(ctx, h, args...), nil
}

// Command returns the command that runs the program, see Root.Command.
func (p Program) Command(ctx context.Context, h Host, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.Path, args...)
	cmd.Env, cmd.Dir = p.Env, "/"
	if root := h.Path(p.Root); root != "/" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	}
	return cmd
}

// IgnoreWaitDelay returns nil for exec.ErrWaitDelay, and any other error of cmd.Wait as it is.
// Such a command has succeeded, but its output was still open after cmd.WaitDelay: a child that
// the calling program forks at the same time inherits the output and keeps it open until its
// exec, which can take seconds on a busy node.
func IgnoreWaitDelay(err error) error {
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	return err
}

// OneLine returns a program's output on one line, shortened, for an error.
func OneLine(out string) string {
	const most = 400
	s := strings.Join(strings.Fields(strings.ToValidUTF8(out, "�")), " ")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// programDirs returns the possible directories of the driver's programs, with the driver root
// at a path: those of a tree that the library is in, those of the places that have the library,
// which may be outside of the driver root, and the usual ones.
func (r Root) programDirs(at string) []string {
	libraryPath := r.Library
	if below, ok := strings.CutPrefix(r.Library, strings.TrimSuffix(r.Path, "/")+"/"); ok {
		libraryPath = filepath.Join(at, below)
	}
	dirs := []string{filepath.Join(filepath.Dir(filepath.Dir(libraryPath)), "bin")}
	dirs = append(dirs, placeProgramDirs(at, libraryPath)...)
	dirs = append(dirs, placeProgramDirs("/", libraryPath)...)
	for _, dir := range []string{"usr/bin", "bin", "usr/sbin", "sbin", "usr/local/bin", "usr/local/nvidia/bin"} {
		dirs = append(dirs, filepath.Join(at, dir))
	}
	return unique(dirs)
}

// libraryPath returns the directories that the host's loader must search in
// addition to its usual ones.
func (r Root) libraryPath() []string {
	if r.Path == "/" && len(r.LibraryDirs) == 0 {
		return nil
	}
	return append([]string{filepath.Dir(r.Library)}, r.LibraryDirs...)
}

func environment(program string, libraryDirs []string) []string {
	env := []string{"PATH=" + filepath.Dir(program) + ":/usr/sbin:/usr/bin:/sbin:/bin"}
	if len(libraryDirs) > 0 {
		env = append(env, "LD_LIBRARY_PATH="+strings.Join(libraryDirs, ":"))
	}
	return env
}

// Locate returns the first executable file with the name in the directories, "" if there is none.
// For those of a host call it inside Host.Do.
func Locate(dirs []string, name string) string {
	for _, dir := range dirs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// interpreter returns the loader of a program; "" for a static program or a
// script.
func interpreter(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	program, err := elf.NewFile(f)
	if err != nil {
		return "", nil // a script: whoever runs it finds out
	}
	for _, segment := range program.Progs {
		if segment.Type == elf.PT_INTERP {
			name, err := io.ReadAll(io.LimitReader(segment.Open(), 4096))
			return strings.TrimRight(string(name), "\x00"), err
		}
	}
	return "", nil
}

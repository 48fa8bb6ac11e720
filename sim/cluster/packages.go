package cluster

import (
	"context"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

const busyboxPath = "/bin/busybox"

// need is something the host must have for building or running, and the Debian package
// that brings it.
type need struct {
	pkg     string
	present func() bool
}

// needs are those of the builds.
func needs() []need {
	file := func(path string) func() bool {
		return func() bool { _, err := os.Stat(path); return err == nil }
	}
	return []need{
		{"gcc", func() bool { _, err := exec.LookPath("gcc"); return err == nil }},
		{"libc6-dev", file("/usr/include/stdlib.h")},
		{"pkg-config", func() bool { _, err := exec.LookPath("pkg-config"); return err == nil }},
		{"libseccomp-dev", file("/usr/include/seccomp.h")},
		{"busybox-static", func() bool { return isStatic(busyboxPath) }},
	}
}

// isStatic reports whether path is a program that needs no dynamic loader.
func isStatic(path string) bool {
	f, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	for _, program := range f.Progs {
		if program.Type == elf.PT_INTERP {
			return false
		}
	}
	return true
}

func missingPackages(wanted []need) []string {
	var missing []string
	for _, n := range wanted {
		if !n.present() {
			missing = append(missing, n.pkg)
		}
	}
	return missing
}

// ensurePackages installs what is missing, or says in one error what has to be installed by hand.
func ensurePackages(ctx context.Context, wanted []need, log io.Writer) error {
	missing := missingPackages(wanted)
	if len(missing) == 0 {
		return nil
	}
	names := strings.Join(missing, " ")
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this host lacks %s (Debian's names) and has no apt-get: install them and try again", names)
	}
	done := progress(log, "installing "+names+" with apt-get")
	defer done()
	var out []byte
	for _, args := range [][]string{{"update"}, append([]string{"install", "-y", "--no-install-recommends"}, missing...)} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		var err error
		// An update that fails for one of several sources may still serve.
		if out, err = cmd.CombinedOutput(); err != nil && args[0] == "install" {
			return fmt.Errorf("this host lacks %s, and apt-get could not install them: %w\n%s", names, err, lastLines(string(out), 5))
		}
	}
	if missing := missingPackages(wanted); len(missing) > 0 {
		return fmt.Errorf("this host lacks %s even after apt-get installed them: install them by hand", strings.Join(missing, " "))
	}
	return nil
}

package healthmonitor

import (
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/tessera-dra/tessera/pkg/health"
)

// moduleDir is the directory of the loaded NVIDIA kernel module, in sysfs.
const moduleDir = "module/nvidia"

// load returns the current load of the driver.
func (m *Monitor) load() health.Load { return CurrentLoad(m.cfg.BootID, m.hardware.Sys) }

// CurrentLoad returns the current load of the driver. sys is where this process sees the
// host's /sys.
//
// The inode number of that directory differs for each load in one boot: kernfs gives
// numbers in increasing order. (Before Linux 4.14 a number may come again. Then a
// reload isn't noticed, and a cause that would end by it stays until the next one.)
func CurrentLoad(bootID, sys string) health.Load {
	l := health.Load{Boot: bootID}
	info, err := os.Stat(filepath.Join(sys, moduleDir))
	if err != nil {
		return l // not loaded now, or not as a module
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		l.Driver = strconv.FormatUint(stat.Ino, 10)
	}
	return l
}

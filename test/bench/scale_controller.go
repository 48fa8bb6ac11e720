package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/test/metrics"
)

// controllerProcess is the controller's program, running.
type controllerProcess struct {
	cmd             *exec.Cmd
	metrics, health string // addresses
}

// startController starts the program with further flags. It logs into a file of dir.
func startController(program, kubeconfig, dir string, flags ...string) (*controllerProcess, error) {
	log, err := os.OpenFile(filepath.Join(dir, "controller.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start the controller: %w", err)
	}
	defer log.Close()
	var addresses [2]string
	for i := range addresses {
		if addresses[i], err = freeAddress(); err != nil {
			return nil, fmt.Errorf("start the controller: %w", err)
		}
	}
	c := &controllerProcess{metrics: addresses[0], health: addresses[1]}
	flags = append(flags, "--kubeconfig", kubeconfig, "--namespace", "default", "--metrics-address", c.metrics, "--health-address", c.health)
	c.cmd = exec.Command(program, flags...)
	c.cmd.Stdout, c.cmd.Stderr = log, log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the controller: %w", err)
	}
	return c, nil
}

// freeAddress returns an address at which nothing listens.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// stop ends the program with a signal, and waits for its end.
func (c *controllerProcess) stop(signal os.Signal) error {
	if err := c.cmd.Process.Signal(signal); err != nil {
		return fmt.Errorf("stop the controller: %w", err)
	}
	var exit *exec.ExitError
	if err := c.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		return fmt.Errorf("stop the controller: %w", err)
	}
	return nil
}

// awaitReady waits until the program's caches are filled.
func (c *controllerProcess) awaitReady(ctx context.Context) error {
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		r, err := get(ctx, "http://"+c.health+"/readyz")
		if err != nil {
			return false, nil // not yet
		}
		defer r.Body.Close()
		return r.StatusCode == http.StatusOK, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the controller to be ready: %w", err)
	}
	return nil
}

// memory returns the resident memory, now and at its peak, in MiB.
func (c *controllerProcess) memory() (now, peak float64, err error) {
	process := fmt.Sprintf("/proc/%d", c.cmd.Process.Pid)
	if now, err = resident(process); err == nil {
		peak, err = statusMiB(process, "VmHWM")
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read the controller's memory: %w", err)
	}
	return now, peak, nil
}

// processorTime returns the CPU time that the program has used since its start.
func (c *controllerProcess) processorTime(ctx context.Context) (time.Duration, error) {
	s, err := c.metric(ctx, "process_cpu_seconds_total")
	return time.Duration(s * float64(time.Second)), err
}

// metric returns the value of a metric without labels.
func (c *controllerProcess) metric(ctx context.Context, name string) (float64, error) {
	families, err := scrape(ctx, "http://"+c.metrics+"/metrics")
	if err != nil {
		return 0, err
	}
	for _, m := range families[name].GetMetric() {
		return m.GetGauge().GetValue() + m.GetCounter().GetValue(), nil
	}
	return 0, fmt.Errorf("the controller has no metric %s", name)
}

func get(ctx context.Context, url string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(r)
}

// scrape reads the metrics that are served at a URL, by name.
func scrape(ctx context.Context, url string) (metrics.Families, error) {
	r, err := get(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	defer r.Body.Close()
	return metrics.Parse(r.Body)
}

func tail(file string) []byte {
	log, err := os.ReadFile(file)
	if err != nil {
		return []byte(err.Error())
	}
	lines := bytes.SplitAfter(log, []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-20):], nil)
}

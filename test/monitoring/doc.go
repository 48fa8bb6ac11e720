// Package monitoring tests the chart's rules and dashboards with a real Prometheus:
// the rules on series that are written down, and every query of a dashboard and of
// docs/user/monitor.md and every alert on a cluster with claims of every kind and GPUs
// that fail. It is the long check "prometheus" of hack/long-checks.sh. The check "scaling"
// runs demo/autoscaling with prometheus-adapter.
package monitoring

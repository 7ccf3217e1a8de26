# The contract on this machine: one process for each machine of the pool. What a cloud's pool takes from user_data comes from
# var.local here; `{port}` and `{name}` in its words stand for a machine's own. Built-in provider only.

terraform { required_version = ">= 1.11" }

variable "local" {
  description = "What only processes need: folder, command, environment, readiness, and the first machine's port, one more for each further machine."
  type = object({
    folder      = string
    command     = list(string)
    environment = optional(map(string), {})
    ready       = object({ url = string, contains = optional(string, "") })
    first_port  = optional(number, 0)
  })
}

locals {
  machines = { for i in range(var.pool.min) : "${var.pool.name}-${i}" => var.local.first_port + i }
}

module "machine" {
  for_each    = local.machines
  source      = "../process"
  name        = each.key
  folder      = var.local.folder
  command     = [for word in var.local.command : replace(replace(word, "{port}", each.value), "{name}", each.key)]
  environment = { for name, text in var.local.environment : name => replace(replace(text, "{port}", each.value), "{name}", each.key) }
  ready = {
    url      = replace(var.local.ready.url, "{port}", each.value)
    contains = replace(var.local.ready.contains, "{name}", each.key)
  }
}

output "pool" {
  description = "The running pool, in the shape that all pool modules share."
  value = {
    name     = var.pool.name
    cloud    = "local"
    region   = var.pool.region
    role     = var.pool.role
    endpoint = var.pool.role == "gateway" ? "127.0.0.1" : null
    identity = var.pool.name
    group    = join(",", keys(local.machines))
    network  = { id = "loopback", subnets = [], routes = [] }
  }
  depends_on = [module.machine]
}

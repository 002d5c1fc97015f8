package android.view

open class View {
    var isEnabled = true

    fun setOnClickListener(listener: OnClickListener?) = Unit

    fun interface OnClickListener {
        fun onClick(view: View)
    }
}

open class ViewGroup : View() {
    open class LayoutParams

    fun addView(child: View) = Unit
    fun addView(child: View, params: LayoutParams) = Unit
}
